#include "weight_ring.h"

#include "device.h"
#include "sim.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <string.h>

static constexpr size_t slot_alignment  = 256;
static constexpr size_t max_padding     = 64 * 1024; // one row of 512 elements of the largest type is far smaller
static constexpr int    default_uses    = 4;         // ring size where none was asked for, in largest weights
static constexpr double timed_part      = 0.7;       // of new times in the running mean: a load is to be seen at once

WeightRing::WeightRing(ggml_backend_t compute, ggml_backend_t transfer)
    : compute_(compute), transfer_(transfer), device_(ggml_backend_get_device(compute)) {
    all_read_ = ggml_backend_event_new(device_);
    meter_    = device_ == sim_device() ? make_host_link_meter() : make_cuda_link_meter(transfer);
}

WeightRing::~WeightRing() {
    free_memory();
    if (all_read_ != nullptr) {
        ggml_backend_event_free(all_read_);
    }
}

void WeightRing::forget_sequence() {
    for (auto * events : {&arrived_, &read_}) {
        for (ggml_backend_event_t event : *events) {
            if (event != nullptr) {
                ggml_backend_event_free(event);
            }
        }
        events->clear();
    }
    weights_.clear();
    issued_ = consumed_ = 0;
}

void WeightRing::free_memory() {
    ggml_backend_synchronize(transfer_);
    ggml_backend_synchronize(compute_);
    forget_sequence();
    buffer_.reset();
}

bool WeightRing::same_sequence(const Program & program) const {
    if (weights_.size() != program.streams.size()) {
        return false;
    }
    for (const Operation & operation : program.operations) {
        for (int i = operation.first_stream; i < operation.last_stream; i++) {
            if (weights_[i] != program.streams[i].weight || group_ends_[i] != operation.last_stream) {
                return false;
            }
        }
    }
    return true;
}

bool WeightRing::allocate(size_t bytes, bool may_shrink) {
    if (buffer_ && (size_bytes() == bytes || (size_bytes() > bytes && !may_shrink))) {
        return true;
    }
    free_memory();
    buffer_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_get_default_buffer_type(compute_), bytes));
    generation_++;
    if (!buffer_) {
        return false;
    }
    ggml_backend_buffer_clear(buffer_.get(), 0);
    return true;
}

ggml_backend_buffer_t WeightRing::lend(size_t ring_bytes) {
    if (!allocate(ring_bytes, ring_bytes != asked_bytes_)) {
        return nullptr;
    }
    asked_bytes_ = ring_bytes;
    ggml_backend_synchronize(transfer_);
    ggml_backend_synchronize(compute_);
    forget_sequence();
    return buffer_.get();
}

size_t WeightRing::slot_bytes(const ggml_tensor * weight) const {
    const size_t bytes = ggml_backend_buft_get_alloc_size(ggml_backend_get_default_buffer_type(compute_), weight);
    return (bytes + slot_alignment - 1) / slot_alignment * slot_alignment;
}

bool WeightRing::set_sequence(const Program & program, size_t ring_bytes) {
    const int n = static_cast<int>(program.streams.size());
    if (n == 0 || (ring_bytes == asked_bytes_ && same_sequence(program))) {
        return true; // a program without streams leaves the ring, and what was prefetched for others, alone
    }
    ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(compute_);
    std::vector<size_t>        sizes(n), padded(n);
    for (int i = 0; i < n; i++) {
        sizes[i]  = ggml_nbytes(program.streams[i].weight);
        padded[i] = slot_bytes(program.streams[i].weight);
    }
    const size_t largest = *std::max_element(padded.begin(), padded.end());
    const size_t wanted  = std::max(largest, ring_bytes > 0 ? ring_bytes : default_uses * largest);
    if (!allocate(wanted, ring_bytes != asked_bytes_)) {
        return false;
    }
    asked_bytes_ = ring_bytes;
    if (!zeros_) {
        bool is_pinned = false; // does not matter: copies work either way
        zeros_.reset(ats_alloc_activations(max_padding, is_pinned));
        if (!zeros_) {
            return false;
        }
        memset(ggml_backend_buffer_get_base(zeros_.get()), 0, max_padding);
    }

    // Copies of the old sequence may still be read by launches under way: new copies wait for those.
    forget_sequence();
    if (all_read_ != nullptr) {
        ggml_backend_event_record(all_read_, compute_);
        ggml_backend_event_wait(transfer_, all_read_);
    }
    weights_.resize(n);
    group_ends_.assign(n, 0);
    for (const Operation & operation : program.operations) {
        for (int i = operation.first_stream; i < operation.last_stream; i++) {
            group_ends_[i] = operation.last_stream;
        }
    }
    slots_ = layout_ring(padded, group_ends_, size_bytes() / slot_alignment * slot_alignment);
    copies_.resize(n);
    paddings_.assign(n, ggml_tensor{});
    arrived_.assign(n, nullptr);
    read_.assign(n, nullptr);
    char * base = static_cast<char *>(ggml_backend_buffer_get_base(buffer_.get()));
    for (int i = 0; i < n; i++) {
        weights_[i]          = program.streams[i].weight;
        copies_[i]           = *program.streams[i].weight;
        copies_[i].buffer    = buffer_.get();
        copies_[i].data      = base + slots_[i].offset;
        copies_[i].view_src  = nullptr;
        const size_t padding = ggml_backend_buft_get_alloc_size(type, program.streams[i].weight) - sizes[i];
        if (padding > 0) {
            ggml_tensor & tensor = paddings_[i];
            tensor.type          = GGML_TYPE_I8;
            tensor.buffer        = buffer_.get();
            tensor.data          = base + slots_[i].offset + sizes[i];
            tensor.ne[0]         = static_cast<int64_t>(std::min(padding, max_padding));
            tensor.ne[1] = tensor.ne[2] = tensor.ne[3] = 1;
            tensor.nb[0]                               = 1;
            tensor.nb[1] = tensor.nb[2] = tensor.nb[3] = tensor.ne[0];
        }
    }
    for (const Operation & operation : program.operations) {
        if (operation.last_stream > operation.first_stream) {
            arrived_[operation.last_stream - 1] = ggml_backend_event_new(device_); // null on devices without events
            read_[operation.last_stream - 1]    = ggml_backend_event_new(device_);
        }
    }
    return true;
}

void WeightRing::copy(int use) {
    const int n       = static_cast<int>(weights_.size());
    const int blocker = (use - slots_[use].blocker_distance % n + n) % n;
    if (issued_ >= slots_[use].blocker_distance) {
        ggml_backend_event_t read = read_[group_ends_[blocker] - 1];
        if (read != nullptr) {
            ggml_backend_event_wait(transfer_, read);
        }
    }
    const size_t bytes = ggml_nbytes(weights_[use]);
    if (is_timed_) {
        meter_->before_copy();
    }
    ggml_backend_tensor_set_async(transfer_, &copies_[use], weights_[use]->data, 0, bytes);
    if (is_timed_) {
        meter_->after_copy(static_cast<int64_t>(bytes));
        counters_.busy_ns += static_cast<int64_t>(static_cast<double>(bytes) * ns_per_byte_);
    }
    if (paddings_[use].data != nullptr) {
        ggml_backend_tensor_set_async(transfer_, &paddings_[use], ggml_backend_buffer_get_base(zeros_.get()), 0,
                                      ggml_nbytes(&paddings_[use]));
    }
    if (arrived_[use] != nullptr) {
        ggml_backend_event_record(arrived_[use], transfer_);
    }
    counters_.copied_bytes += static_cast<int64_t>(bytes);
    counters_.n_copies++;
    issued_++;
}

void WeightRing::set_timed(bool timed) {
    is_timed_ = timed && meter_ != nullptr;
    if (is_timed_) {
        const LinkSamples samples = meter_->collect();
        if (samples.bytes > 0) {
            const double now = static_cast<double>(samples.ns) / static_cast<double>(samples.bytes);
            ns_per_byte_ += (ns_per_byte_ > 0 ? timed_part : 1.0) * (now - ns_per_byte_);
        }
    }
}

void WeightRing::prefetch(int limit, bool may_be_lent) {
    const int n = static_cast<int>(weights_.size());
    if (n == 0) {
        return;
    }
    int64_t end = consumed_ + limit;
    if (may_be_lent) {
        end = std::min(end, (consumed_ / n + 1) * n + group_ends_.front());
    }
    while (issued_ < end) {
        const int use = static_cast<int>(issued_ % n);
        if (issued_ - slots_[use].blocker_distance >= consumed_) {
            return; // its region is promised to a reader that was not launched yet
        }
        copy(use);
    }
}

void WeightRing::acquire(int first, int last) {
    if (first == last) {
        return;
    }
    if (issued_ < consumed_ + (last - first)) {
        counters_.n_stalls++;
        prefetch(last - first);
    }
    GGML_ASSERT(issued_ >= consumed_ + (last - first)); // groups are at most half the ring
    if (arrived_[last - 1] != nullptr) {
        ggml_backend_event_wait(compute_, arrived_[last - 1]);
    }
    consumed_ += last - first;
}

void WeightRing::release(int last) {
    if (last > 0 && read_[last - 1] != nullptr) {
        ggml_backend_event_record(read_[last - 1], compute_);
    }
}
