#include "sim.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <string.h>

namespace {

ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// ---- buffer type ----

const char * buffer_type_name(ggml_backend_buffer_type_t) {
    return "SIM";
}

ggml_backend_buffer_t buffer_type_alloc(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (buffer != nullptr) {
        buffer->buft = type;
    }
    return buffer;
}

size_t buffer_type_alignment(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

bool buffer_type_is_host(ggml_backend_buffer_type_t) {
    return false;
}

ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type type = {
        /* .iface   = */ {
            /* .get_name       = */ buffer_type_name,
            /* .alloc_buffer   = */ buffer_type_alloc,
            /* .get_alignment  = */ buffer_type_alignment,
            /* .get_max_size   = */ nullptr,
            /* .get_alloc_size = */ nullptr,
            /* .is_host        = */ buffer_type_is_host,
        },
        /* .device  = */ sim_device(),
        /* .context = */ nullptr,
    };
    return &type;
}

// ---- backend: a CPU backend behind an asynchronous interface that happens to be synchronous ----

ggml_backend_t cpu_of(ggml_backend_t backend) {
    return static_cast<ggml_backend_t>(backend->context);
}

const char * backend_name(ggml_backend_t) {
    return "SIM";
}

void backend_free(ggml_backend_t backend) {
    ggml_backend_free(cpu_of(backend));
    delete backend;
}

void backend_set_tensor_async(ggml_backend_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    memcpy(static_cast<char *>(tensor->data) + offset, data, size);
}

void backend_get_tensor_async(ggml_backend_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    memcpy(data, static_cast<const char *>(tensor->data) + offset, size);
}

void backend_synchronize(ggml_backend_t) {}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    return ggml_backend_graph_compute(cpu_of(backend), graph);
}

ggml_guid_t backend_guid() {
    static ggml_guid guid = {0x61, 0x74, 0x73, 0x70, 0x6c, 0x61, 0x6e, 0x2d, 0x73, 0x69, 0x6d, 0x75, 0x6c, 0x61, 0x74, 0x65};
    return &guid;
}

// ---- device ----

const char * device_name(ggml_backend_dev_t) {
    return "SIM";
}

const char * device_description(ggml_backend_dev_t) {
    return "simulated GPU";
}

void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    ggml_backend_dev_memory(cpu_device(), free, total);
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    ggml_backend_dev_get_props(cpu_device(), props);
    props->name        = device_name(device);
    props->description = device_description(device);
    props->type        = device_type(device);
    props->caps        = {};
}

ggml_backend_t device_init(ggml_backend_dev_t device, const char *) {
    ggml_backend_t cpu = ggml_backend_dev_init(cpu_device(), nullptr);
    if (cpu == nullptr) {
        return nullptr;
    }
    ggml_backend_i functions     = {};
    functions.get_name           = backend_name;
    functions.free               = backend_free;
    functions.set_tensor_async   = backend_set_tensor_async;
    functions.get_tensor_async   = backend_get_tensor_async;
    functions.synchronize        = backend_synchronize;
    functions.graph_compute      = backend_graph_compute;
    return new ggml_backend{backend_guid(), functions, device, cpu};
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) {
    return buffer_type();
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return ggml_backend_dev_supports_op(cpu_device(), op);
}

bool device_supports_buffer_type(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return type == buffer_type();
}

} // namespace

ggml_backend_dev_t sim_device() {
    static ggml_backend_device device = {
        /* .iface   = */ {
            /* .get_name             = */ device_name,
            /* .get_description      = */ device_description,
            /* .get_memory           = */ device_memory,
            /* .get_type             = */ device_type,
            /* .get_props            = */ device_props,
            /* .init_backend         = */ device_init,
            /* .get_buffer_type      = */ device_buffer_type,
            /* .get_host_buffer_type = */ nullptr,
            /* .buffer_from_host_ptr = */ nullptr,
            /* .supports_op          = */ device_supports_op,
            /* .supports_buft        = */ device_supports_buffer_type,
            /* .offload_op           = */ nullptr,
            /* .event_new            = */ nullptr,
            /* .event_free           = */ nullptr,
            /* .event_synchronize    = */ nullptr,
        },
        /* .reg     = */ ggml_backend_dev_backend_reg(cpu_device()),
        /* .context = */ nullptr,
    };
    return &device;
}

void sim_set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_cpu_set_n_threads(cpu_of(backend), n_threads);
}
