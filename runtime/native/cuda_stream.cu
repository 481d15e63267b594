#include "cuda_stream.h"

#include "ggml-backend-impl.h"

#include <string>

namespace {

// How ggml's CUDA backend context of this exact llama.cpp version begins; find_stream() proves it before use.
struct CudaContextPrefix {
    int          device;
    std::string  name;
    cudaEvent_t  copy_event;
    cudaStream_t streams[16][8];
};

} // namespace

// While `stream` is captured: what the backend records now is captured as well if that is its stream. A stream that waits
// for a captured event takes part in the capture, and has to be joined again.
static bool records_into(ggml_backend_t backend, cudaStream_t stream) {
    ggml_backend_event_t event = ggml_backend_event_new(ggml_backend_get_device(backend));
    cudaStream_t         other = nullptr;
    cudaEvent_t          back  = nullptr;
    bool                 same  = false;
    if (event != nullptr && cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess &&
        cudaEventCreateWithFlags(&back, cudaEventDisableTiming) == cudaSuccess &&
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess) {
        ggml_backend_event_record(event, backend);
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        cudaStreamWaitEvent(other, static_cast<cudaEvent_t>(event->context), 0);
        same = cudaStreamIsCapturing(other, &status) == cudaSuccess && status == cudaStreamCaptureStatusActive;
        if (same) {
            cudaEventRecord(back, other);
            cudaStreamWaitEvent(stream, back, 0);
        }
        cudaGraph_t graph = nullptr;
        cudaStreamEndCapture(stream, &graph);
        if (graph != nullptr) {
            cudaGraphDestroy(graph);
        }
    }
    if (back != nullptr) {
        cudaEventDestroy(back);
    }
    if (other != nullptr) {
        cudaStreamDestroy(other);
    }
    if (event != nullptr) {
        ggml_backend_event_free(event);
    }
    cudaGetLastError();
    return same;
}

cudaStream_t find_stream(ggml_backend_t backend) {
    ggml_backend_synchronize(backend); // creates the stream
    const auto * context = static_cast<const CudaContextPrefix *>(backend->context);
    if (context->device < 0 || context->device >= 16 || context->name != ggml_backend_name(backend)) {
        return nullptr;
    }
    cudaStream_t stream = context->streams[context->device][0];
    return stream != nullptr && records_into(backend, stream) ? stream : nullptr;
}
