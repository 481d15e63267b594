// Streams weights from pinned host memory through a ring in VRAM, ahead of use.
#pragma once

#include "link_meter.h"
#include "ring.h"
#include "schedule.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <memory>
#include <vector>

struct RingCounters {
    int64_t copied_bytes = 0;
    int64_t n_copies     = 0;
    int64_t n_stalls     = 0; // a copy was wanted at once, but its region was still being read
    int64_t busy_ns      = 0; // what the copies take, at the rate of those that were timed
};

// Copies are numbered by use: 0, 1, 2, ... over all rounds of one sequence. A group is what one launch waits for.
class WeightRing {
  public:
    // `compute` is where readers run, `transfer` a second instance of the same device for the copies.
    WeightRing(ggml_backend_t compute, ggml_backend_t transfer);
    ~WeightRing();
    WeightRing(const WeightRing &) = delete;

    // What a weight takes in the ring: its bytes, padding, and alignment.
    size_t slot_bytes(const ggml_tensor * weight) const;

    // Take up the program's sequence of streamed weights. Copies already under way stay valid if neither it nor
    // `ring_bytes` has changed. Returns false if VRAM for the ring cannot be had.
    bool set_sequence(const Program & program, size_t ring_bytes);

    // The ring's memory, for others to use until the next sequence is taken up. Nothing of the ring is under way then.
    // Null: out of memory.
    ggml_backend_buffer_t lend(size_t ring_bytes);

    // That size was asked for last: asking for it again leaves the memory where it is.
    bool is_of(size_t ring_bytes) const { return ring_bytes == asked_bytes_; }

    // Changes whenever the ring's memory does.
    int generation() const { return generation_; }

    // Time some of the copies from now on, or none.
    void set_timed(bool timed);

    // Issue every copy that has room, up to `limit` uses from now. Where the ring's memory may be lent before the next
    // round, of that round the first launch's at most: whoever borrows it has to wait for the copies.
    void prefetch(int limit, bool may_be_lent = false);

    // Make the compute stream wait for uses [first, last) and point their nodes at the copies, run `launch`, restore the
    // nodes, and mark the regions as free once the launch has run.
    template <typename Launch> ggml_status with_weights(const Program & program, int first, int last, Launch && launch) {
        acquire(first, last);
        for (int i = first; i < last; i++) {
            program.streams[i].node->src[0] = &copies_[i];
        }
        const ggml_status status = launch();
        for (int i = first; i < last; i++) {
            program.streams[i].node->src[0] = program.streams[i].weight;
        }
        release(last);
        return status;
    }

    size_t               size_bytes() const { return buffer_ ? ggml_backend_buffer_get_size(buffer_.get()) : 0; }
    const RingCounters & counters() const { return counters_; }

  private:
    bool same_sequence(const Program & program) const;
    bool allocate(size_t bytes, bool may_shrink);
    void free_memory();
    void acquire(int first, int last);
    void release(int last);
    void copy(int use);
    void forget_sequence();

    ggml_backend_t                     compute_;
    ggml_backend_t                     transfer_;
    ggml_backend_dev_t                 device_;
    ggml_backend_buffer_ptr            buffer_;
    ggml_backend_buffer_ptr            zeros_; // in host memory; clears the padding of quantised rows
    std::vector<const ggml_tensor *>   weights_;
    std::vector<int>                   group_ends_; // per use: one past the last use of its group
    std::vector<RingSlot>              slots_;
    std::vector<ggml_tensor>           copies_;   // what nodes read: the weight's shape, in the ring
    std::vector<ggml_tensor>           paddings_; // bytes behind the copy; empty tensors where there are none
    std::vector<ggml_backend_event_t>  arrived_;  // per use, set for the last use of a group
    std::vector<ggml_backend_event_t>  read_;     // likewise: the group's launch has run
    ggml_backend_event_t               all_read_ = nullptr; // everything launched before a change of sequence
    std::unique_ptr<LinkMeter>         meter_; // null where copies cannot be timed
    bool                               is_timed_    = false;
    double                             ns_per_byte_ = 0; // of recent copies
    size_t                             asked_bytes_ = 0; // ring size asked for last
    int                                generation_  = 0;
    int64_t                            issued_   = 0;
    int64_t                            consumed_ = 0;
    RingCounters                       counters_;
};
