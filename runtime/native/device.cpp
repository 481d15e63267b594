#include "device.h"

#include "error.h"
#include "executor.h"
#include "settings.h"
#include "sim.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <atomic>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unordered_map>

// Weights are allocated in pieces of this size: when the system refuses to pin more, only the rest is slow.
static constexpr size_t max_host_buffer_bytes = 64 * 1024 * 1024;

ggml_backend_dev_t ats_inner_device() {
    static ggml_backend_dev_t device = [] {
        const char * wanted = getenv("ATSPLAN_DEVICE");
        if (wanted == nullptr) {
            ggml_backend_dev_t gpu = ggml_backend_dev_by_name("CUDA0");
            return gpu != nullptr ? gpu : sim_device();
        }
        return strcasecmp(wanted, "sim") == 0 ? sim_device() : ggml_backend_dev_by_name(wanted);
    }();
    return device;
}

namespace {

// ---- what of the host memory is pinned ----

struct HostBuffer {
    void (*free_buffer)(ggml_backend_buffer_t);
    int64_t size;
    bool    is_pinned;
};

std::mutex                                             host_buffers_mutex;
std::unordered_map<ggml_backend_buffer_t, HostBuffer>  host_buffers;
std::atomic<int64_t>                                   pinned_bytes{0}, unpinned_bytes{0}; // of all of them

std::atomic<int64_t> & held_bytes(bool pinned) {
    return pinned ? pinned_bytes : unpinned_bytes;
}

// ---- host buffer type ----

ggml_backend_buffer_type_t pinned_type() {
    ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(ats_inner_device());
    return type != nullptr ? type : ggml_backend_cpu_buffer_type();
}

const char * host_type_name(ggml_backend_buffer_type_t) {
    return "ATS_Host";
}

void host_buffer_free(ggml_backend_buffer_t buffer) {
    std::unique_lock<std::mutex> lock(host_buffers_mutex);
    const auto                   entry       = host_buffers.find(buffer);
    const auto                   free_buffer = entry->second.free_buffer;
    held_bytes(entry->second.is_pinned) -= entry->second.size;
    host_buffers.erase(entry);
    lock.unlock();
    free_buffer(buffer);
}

ggml_backend_buffer_t host_type_alloc(ggml_backend_buffer_type_t type, size_t size) {
    const int64_t bytes   = static_cast<int64_t>(size);
    const int64_t limit   = current_settings()->max_pinned_bytes;
    const bool    allowed = limit == 0 || held_bytes(true) + bytes <= limit;
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(allowed ? pinned_type() : ggml_backend_cpu_buffer_type(), size);
    if (buffer != nullptr) {
        // The inner type falls back to pageable memory by itself, silently.
        const bool is_pinned = allowed && buffer->buft == pinned_type();
        std::lock_guard<std::mutex> lock(host_buffers_mutex);
        host_buffers[buffer]      = {buffer->iface.free_buffer, bytes, is_pinned};
        held_bytes(is_pinned) += bytes;
        buffer->iface.free_buffer = host_buffer_free;
        buffer->buft              = type;
    }
    return buffer;
}

size_t host_type_max_size(ggml_backend_buffer_type_t) {
    return max_host_buffer_bytes; // ggml gives a larger tensor a buffer of its own
}

size_t host_type_alignment(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(pinned_type());
}

bool host_type_is_host(ggml_backend_buffer_type_t) {
    return true;
}

// ---- backend ----

Executor * executor_of(ggml_backend_t backend) {
    return static_cast<Executor *>(backend->context);
}

const char * backend_name(ggml_backend_t) {
    return "ATS";
}

void backend_free(ggml_backend_t backend) {
    delete executor_of(backend);
    delete backend;
}

void backend_set_tensor_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    ggml_backend_tensor_set_async(executor_of(backend)->compute_backend(), tensor, data, offset, size);
}

void backend_get_tensor_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    ggml_backend_tensor_get_async(executor_of(backend)->compute_backend(), tensor, data, offset, size);
}

void backend_synchronize(ggml_backend_t backend) {
    ggml_backend_synchronize(executor_of(backend)->compute_backend());
}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    return executor_of(backend)->compute(graph);
}

void backend_graph_optimize(ggml_backend_t backend, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    ggml_backend_t inner = executor_of(backend)->compute_backend();
    if (inner->iface.graph_optimize != nullptr) {
        inner->iface.graph_optimize(inner, graph, params);
    }
}

void backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    executor_of(backend)->set_n_threads(n_threads);
}

void backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    executor_of(backend)->set_abort_callback(callback, data);
}

ggml_guid_t backend_guid() {
    static ggml_guid guid = {0x61, 0x74, 0x73, 0x70, 0x6c, 0x61, 0x6e, 0x2d, 0x68, 0x79, 0x62, 0x72, 0x69, 0x64, 0x2d, 0x30};
    return &guid;
}

// ---- devices ----

bool is_compute_device(ggml_backend_dev_t device) {
    return device->context == nullptr;
}

const char * device_name(ggml_backend_dev_t device) {
    return is_compute_device(device) ? "ATS0" : "ATSHOST";
}

const char * device_description(ggml_backend_dev_t device) {
    return is_compute_device(device) ? "GPU and CPU as one device, scheduled by tensor" : "pinned host memory of ATS0";
}

void device_memory(ggml_backend_dev_t device, size_t * free, size_t * total) {
    *free = *total = 0;
    if (is_compute_device(device)) {
        ggml_backend_dev_memory(ats_inner_device(), free, total);
    }
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    ggml_backend_dev_get_props(ats_inner_device(), props);
    props->name        = device_name(device);
    props->description = device_description(device);
    props->type        = device_type(device);
    props->device_id   = nullptr; // the inner device has it; two devices with one id are taken for duplicates
    device_memory(device, &props->memory_free, &props->memory_total);
    props->caps.events               = false; // ordering is ours; llama.cpp must not pipeline through us
    props->caps.buffer_from_host_ptr = false;
}

ggml_backend_t device_init(ggml_backend_dev_t device, const char *) {
    std::unique_ptr<Executor> executor = Executor::create();
    if (executor == nullptr) {
        return nullptr;
    }
    ggml_backend_i functions   = {};
    functions.get_name         = backend_name;
    functions.free             = backend_free;
    functions.set_tensor_async = backend_set_tensor_async;
    functions.get_tensor_async = backend_get_tensor_async;
    functions.synchronize      = backend_synchronize;
    functions.graph_compute    = backend_graph_compute;
    functions.graph_optimize   = backend_graph_optimize;
    return new ggml_backend{backend_guid(), functions, device, executor.release()};
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device) {
    return is_compute_device(device) ? ggml_backend_dev_buffer_type(ats_inner_device()) : ats_host_buffer_type();
}

ggml_backend_buffer_type_t device_host_buffer_type(ggml_backend_dev_t) {
    return pinned_type();
}

bool device_supports_op(ggml_backend_dev_t device, const ggml_tensor * op) {
    if (!is_compute_device(device)) {
        return false;
    }
    for (const ggml_tensor * source : op->src) {
        if (source != nullptr && source->buffer != nullptr && source->buffer->buft == ats_host_buffer_type()) {
            return ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
        }
    }
    return ggml_backend_dev_supports_op(ats_inner_device(), op);
}

bool device_supports_buffer_type(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    return is_compute_device(device) &&
           (type == ats_host_buffer_type() || ggml_backend_dev_supports_buft(ats_inner_device(), type));
}

const ggml_backend_device_i device_functions = {
    /* .get_name             = */ device_name,
    /* .get_description      = */ device_description,
    /* .get_memory           = */ device_memory,
    /* .get_type             = */ device_type,
    /* .get_props            = */ device_props,
    /* .init_backend         = */ device_init,
    /* .get_buffer_type      = */ device_buffer_type,
    /* .get_host_buffer_type = */ device_host_buffer_type,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ device_supports_op,
    /* .supports_buft        = */ device_supports_buffer_type,
    /* .offload_op           = */ nullptr,
    /* .event_new            = */ nullptr,
    /* .event_free           = */ nullptr,
    /* .event_synchronize    = */ nullptr,
};

// ---- registration ----

const char * registry_name(ggml_backend_reg_t) {
    return "ATS";
}

size_t registry_device_count(ggml_backend_reg_t) {
    return 2;
}

ggml_backend_dev_t registry_device(ggml_backend_reg_t registry, size_t index) {
    static char                is_host_device;
    static ggml_backend_device devices[2] = {
        {device_functions, registry, nullptr},
        {device_functions, registry, &is_host_device},
    };
    return index < 2 ? &devices[index] : nullptr;
}

void * registry_function(ggml_backend_reg_t, const char * name) {
    if (strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(backend_set_n_threads);
    }
    if (strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return reinterpret_cast<void *>(backend_set_abort_callback);
    }
    return nullptr;
}

ggml_backend_reg registry = {
    /* .api_version = */ GGML_BACKEND_API_VERSION,
    /* .iface       = */ {registry_name, registry_device_count, registry_device, registry_function},
    /* .context     = */ nullptr,
};

} // namespace

bool ats_is_pinned(ggml_backend_buffer_t buffer) {
    std::lock_guard<std::mutex> lock(host_buffers_mutex);
    const auto                  entry = host_buffers.find(buffer);
    return entry != host_buffers.end() && entry->second.is_pinned;
}

ggml_backend_buffer_t ats_alloc_activations(size_t size, bool & is_pinned) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(pinned_type(), size);
    is_pinned                    = buffer != nullptr && buffer->buft == pinned_type(); // else it fell back silently
    return buffer;
}

int64_t ats_unpinned_bytes() {
    return held_bytes(false);
}

ggml_backend_buffer_type_t ats_host_buffer_type() {
    static ggml_backend_buffer_type type = {
        /* .iface   = */ {
            /* .get_name       = */ host_type_name,
            /* .alloc_buffer   = */ host_type_alloc,
            /* .get_alignment  = */ host_type_alignment,
            /* .get_max_size   = */ host_type_max_size,
            /* .get_alloc_size = */ nullptr,
            /* .is_host        = */ host_type_is_host,
        },
        /* .device  = */ registry_device(&registry, 1),
        /* .context = */ nullptr,
    };
    return &type;
}

bool ats_is_host_weight(const ggml_tensor * tensor) {
    return tensor->buffer != nullptr && tensor->buffer->buft == ats_host_buffer_type() &&
           ggml_backend_buffer_get_usage(tensor->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

int ats_device_memory(int64_t * free_bytes, int64_t * total_bytes) {
    if (free_bytes == nullptr || total_bytes == nullptr) {
        return ats_fail("ats_device_memory: null argument");
    }
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(ats_inner_device(), &free, &total);
    *free_bytes  = static_cast<int64_t>(free);
    *total_bytes = static_cast<int64_t>(total);
    return 0;
}

// The symbol that ggml_backend_load() looks for. Returning null tells ggml that the plug-in cannot be used.
extern "C" ATS_EXPORT ggml_backend_reg_t ggml_backend_init(void) {
    const char * settings_path = getenv("ATSPLAN_SETTINGS");
    if (settings_path != nullptr && load_settings_file(settings_path) != 0) {
        fprintf(stderr, "atsplan: %s. ATSPLAN_SETTINGS names this file: export the plan again.\n", ats_last_error());
        return nullptr;
    }
    if (ats_inner_device() == nullptr) { // nothing else may silently stand in for it
        fprintf(stderr, "atsplan: llama.cpp finds no device %s, which ATSPLAN_DEVICE names.\n", getenv("ATSPLAN_DEVICE"));
        return nullptr;
    }
    return &registry;
}
