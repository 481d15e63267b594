// C API of the native helper: a ggml backend plug-in with one hybrid device, plus inspection and micro-benchmarks.
//
// The library is loaded through ggml_backend_load(), which registers two devices:
//   ATS0     the hybrid device. Its default buffer type is the inner GPU's, its host buffer type the pinned one.
//   ATSHOST  computes nothing; its default buffer type is the pinned host type, which makes that type addressable.
// The inner GPU is chosen by the environment variable ATSPLAN_DEVICE ("CUDA0", "sim", ...) at load time.
//
// Functions return 0 on success and -1 on failure; ats_last_error() then tells why (per thread, valid until the
// next call). Times are nanoseconds, sizes bytes. Nothing here throws or aborts on bad arguments.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define ATS_API_VERSION 1

#define ATS_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;

ATS_EXPORT int          ats_api_version(void);
ATS_EXPORT const char * ats_build_stamp(void); // the string the build passed in: versions and source hash
ATS_EXPORT const char * ats_last_error(void);

// ---- placement -----------------------------------------------------------------------------------------------

enum ats_class { ATS_GPU = 0, ATS_STREAM = 1, ATS_CPU = 2 };

// Set the classes of host-resident weights, by exact tensor name. Replaces all earlier settings; takes effect with
// the next graph. Weights that are not named are computed on the CPU in decode and streamed in prefill.
// Fails, changing nothing, if a class is not ATS_STREAM or ATS_CPU.
ATS_EXPORT int ats_set_classes(const char * const * names, const int32_t * decode, const int32_t * prefill, int32_t n);

// Options by name: "ring_bytes" (0 = as small as possible), "prefill_min_tokens", "prefetch" (0|1), "zero_copy" (0|1),
// "early_launch" (0|1), "fast_products" (0 = ggml's own CPU kernels only), "statistics" (0|1),
// "max_pinned_bytes" (0 = no limit; host weights beyond it are pageable).
// For expert by expert decoding: "expert_cache_bytes", what one expert costs, "expert_cpu_ns" and "expert_link_ns",
// and beyond that a block, "expert_cpu_base_ns", "expert_link_latency_ns"; it is off while one of the first two is 0.
// "expert_prediction": copying experts that the next layer will probably use ahead (0 = never, 1 = where it pays, 2 = always).
ATS_EXPORT int ats_set_option(const char * name, int64_t value);
ATS_EXPORT int ats_get_option(const char * name, int64_t * value);

struct ats_statistics {
    int64_t n_graphs;          // rounds since the last reset, graphs without host weights included
    int64_t n_compiles;        // times a list of steps was compiled
    int64_t total_ns;          // inside graph_compute
    int64_t cpu_ns;            // computing on the CPU
    int64_t wait_gpu_ns;       // host thread waiting for a GPU result that the CPU needs
    int64_t launch_ns;         // handing work to the GPU
    int64_t copy_issue_ns;     // handing weight copies to the transfer stream
    int64_t streamed_bytes;    // weights
    int64_t activation_bytes;  // both directions
    int64_t n_cpu_steps;
    int64_t n_gpu_steps;
    int64_t n_streamed;
    int64_t n_slot_stalls;     // a copy could not be issued when it was first wanted: its ring slot was still in use
    int64_t link_busy_ns;      // time the transfer stream spent copying, from timing some copies; 0 where that cannot be done
    int64_t ring_bytes;        // VRAM held by the ring now
    int64_t pinned_bytes;      // pinned host memory held for activations now
    int64_t n_experts_resident; // routed experts found in VRAM
    int64_t n_experts_streamed; // copied for this use
    int64_t n_experts_cpu;      // computed on the CPU
    int64_t expert_bytes;       // VRAM held by expert caches now
    int64_t unpinned_bytes;     // host memory for weights held now that is not pinned: slow, and work is not launched ahead
    int64_t expert_cpu_ns;      // computing experts one by one on the CPU
    int64_t expert_gpu_ns;      // the GPU's shares meanwhile, from the decision on, copies included; 0 where unknown
    int64_t expert_decide_ns;   // choosing where to compute experts
    int64_t n_experts_predicted;      // copied to VRAM before the routing was known
    int64_t n_experts_predicted_used; // of them, those that were routed to
};
ATS_EXPORT int ats_get_statistics(struct ats_statistics * out, bool reset);

// ---- the paper's online decision -----------------------------------------------------------------------------
// Which host weights run on the GPU this round, given how fast everything is right now: Algorithm 2 of arXiv 2607.10183,
// O(n^2). Units in execution order, seconds each. A resident unit runs on the GPU. Another one runs on the CPU, or on the
// GPU after a transfer that hides behind what the GPU does since the last CPU unit (or the start). crossing[i] is paid
// where unit i runs on another device than unit i - 1. Fills on_gpu, and `seconds` with the round's, which is minimal.
ATS_EXPORT int ats_choose_transfers(int32_t n, const double * cpu, const double * gpu, const double * crossing,
                                    const double * transfer, const bool * resident, bool * on_gpu, double * seconds);

// ---- inspection ----------------------------------------------------------------------------------------------

struct ats_weight_use {
    const char * name;
    const char * op;
    const char * type;
    int64_t      shape[4];
    int64_t      size_bytes;
    int64_t      input_bytes;     // the activation operand, for the whole batch
    int64_t      output_bytes;
    int32_t      n_experts_used;  // MUL_MAT_ID only
    bool         is_input;        // GET_ROWS by token ids
    int32_t      node;            // index of the node
    int32_t      inputs[8];       // indices into the emitted sequence; -1 ends the list
};
typedef void (*ats_weight_callback)(void * user, const struct ats_weight_use * use);

// Build the graph for n_tokens and call back for every weight operand, in execution order. No weights are touched.
ATS_EXPORT int ats_trace_weights(struct llama_context * context, uint32_t n_tokens, ats_weight_callback callback, void * user);

struct ats_memory {
    const char * buffer_type;
    bool         is_host;
    int64_t      model_bytes, context_bytes, compute_bytes;
};
typedef void (*ats_memory_callback)(void * user, const struct ats_memory * memory);
ATS_EXPORT int ats_memory_breakdown(struct llama_context * context, ats_memory_callback callback, void * user);

// Call back with (name, buffer type name) of every model weight that the current graph uses: where each one landed.
typedef void (*ats_location_callback)(void * user, const char * name, const char * buffer_type, bool is_host);
ATS_EXPORT int ats_weight_locations(struct llama_context * context, ats_location_callback callback, void * user);

// ---- routing -------------------------------------------------------------------------------------------------
// Give ats_routing_eval as llama.cpp's cb_eval, with a counter as its user data, to a context on any device. Then every
// evaluated token counts the experts that it is routed to, per layer.

struct ggml_tensor;
struct ats_routing;
ATS_EXPORT struct ats_routing * ats_routing_create(void);
ATS_EXPORT void                 ats_routing_free(struct ats_routing * routing);
ATS_EXPORT bool                 ats_routing_eval(struct ggml_tensor * node, bool ask, void * routing);

// Call back per layer: the name of its first tensor of experts, and how often each expert was used.
typedef void (*ats_routing_callback)(void * user, const char * weight, const int64_t * counts, int32_t n_experts);
ATS_EXPORT void ats_routing_read(const struct ats_routing * routing, ats_routing_callback callback, void * user);

// Call back with the op of every node, but those that multiply with weights or fetch rows of them, that the inner GPU
// cannot compute: llama.cpp leaves it to its CPU backend.
typedef void (*ats_op_callback)(void * user, const char * op);
ATS_EXPORT int ats_unsupported_ops(struct llama_context * context, uint32_t n_tokens, ats_op_callback callback, void * user);

// ---- micro-benchmarks ----------------------------------------------------------------------------------------
// `samples` receives n_samples durations of one operation. Device: "cpu" or the name of a ggml device, or "sim".

struct ats_matmul_spec {
    int32_t      type;            // ggml_type of the weights
    int64_t      shape[3];        // ne of the weights; shape[2] > 1 for experts
    int32_t      n_experts_used;  // 0: MUL_MAT, else MUL_MAT_ID
    int32_t      n_tokens;
    const void * weights;         // real weight bytes
    int64_t      weights_bytes;   // any number of whole rows; repeated to fill the tensor
    int64_t      cold_bytes;      // rotate over at least this many bytes of distinct weights, to keep caches cold
};
ATS_EXPORT int ats_bench_matmul(const char * device, int32_t n_threads, const struct ats_matmul_spec * spec,
                                int32_t n_warmup, int32_t n_samples, int64_t * samples);

// Time everything in the context's graph for n_tokens but the products with weights (attention, norms, rope, ...) on the
// inner GPU, without the nodes that it cannot compute.
ATS_EXPORT int ats_bench_glue(struct llama_context * context, uint32_t n_tokens, int32_t n_warmup, int32_t n_samples,
                              int64_t * samples);

ATS_EXPORT int ats_bench_transfer(bool host_to_device, bool pinned, int64_t size_bytes, int32_t n_warmup,
                                  int32_t n_samples, int64_t * samples);

// GPU -> CPU -> GPU round trip through the engine's own path.
ATS_EXPORT int ats_bench_crossing(int32_t n_threads, int64_t activation_bytes, int32_t n_warmup, int32_t n_samples,
                                  int64_t * samples);

// What handing over work costs the host thread: starting a graph of n_nodes small nodes, queueing one streamed weight,
// and queueing a publish and a fetch. Three arrays. With a product, each right after the thread computed it, which
// emptied its caches; without one (`spec` is null), all three in turns without a pause.
ATS_EXPORT int ats_bench_host(int32_t n_threads, const struct ats_matmul_spec * spec, int32_t n_nodes, int32_t n_warmup,
                              int32_t n_samples, int64_t * launch, int64_t * stream, int64_t * crossing);

// What the GPU loses where its work comes in pieces, per piece: from one launch of n_nodes small nodes to the next one,
// and from a copy to the launch that waits for it and on to the next copy, which waits for that launch. Two arrays.
ATS_EXPORT int ats_bench_queues(int32_t n_nodes, int32_t n_warmup, int32_t n_samples, int64_t * launch, int64_t * handshake);

// Copying n_experts experts, of matrices with these sizes, to VRAM at once: what it adds to a plain crossing, from the
// decision until the GPU can go on, through the engine's own path. From cold_bytes of distinct weights.
ATS_EXPORT int ats_bench_experts(const int64_t * matrix_bytes, int32_t n_matrices, int32_t n_experts, int64_t cold_bytes,
                                 int32_t n_warmup, int32_t n_samples, int64_t * samples);

struct ats_contention { // bytes per second, medians over several windows within about three times the duration
    double cpu_alone, cpu_while_link_busy, link_alone, link_while_cpu_busy;
};
// With a product of experts, copies are those of single experts, else whole weights'.
ATS_EXPORT int ats_bench_contention(int32_t n_threads, const struct ats_matmul_spec * spec, int64_t copy_bytes,
                                    int64_t duration_ns, struct ats_contention * out);

// Free the copies of weights that ats_bench_matmul() and ats_bench_contention() keep for their next call.
ATS_EXPORT int ats_bench_release(void);

// The inner GPU's memory as its driver sees it; zeros if it does not tell.
ATS_EXPORT int ats_device_memory(int64_t * free_bytes, int64_t * total_bytes);

#ifdef __cplusplus
}
#endif
