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

// An event that the backend records while we capture the candidate stream is part of the capture only if both are the
// same stream.
cudaStream_t find_stream(ggml_backend_t backend) {
    ggml_backend_synchronize(backend); // creates the stream
    const auto * context = static_cast<const CudaContextPrefix *>(backend->context);
    if (context->device < 0 || context->device >= 16 || context->name != ggml_backend_name(backend)) {
        return nullptr;
    }
    cudaStream_t         stream = context->streams[context->device][0];
    ggml_backend_event_t event  = ggml_backend_event_new(ggml_backend_get_device(backend));
    if (event == nullptr) {
        return nullptr;
    }
    if (stream == nullptr || cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) != cudaSuccess) {
        cudaGetLastError();
        ggml_backend_event_free(event);
        return nullptr;
    }
    ggml_backend_event_record(event, backend);
    const bool  same  = cudaEventQuery(static_cast<cudaEvent_t>(event->context)) == cudaErrorCapturedEvent;
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) {
        cudaGraphDestroy(graph);
    }
    cudaGetLastError();
    ggml_backend_event_free(event);
    return same ? stream : nullptr;
}
