#include "executor.h"

#include "clock.h"
#include "device.h"
#include "error.h"
#include "sim.h"
#include "statistics.h"

#include "ggml-backend-impl.h"

#include <algorithm>

namespace {

constexpr size_t  max_programs       = 4;   // decode and prefill graphs of the current and the previous shape
constexpr int64_t runs_before_early  = 3;   // by then kernels are loaded and CUDA graphs captured: no launch can block
constexpr int64_t long_pause_ns      = 4000000000; // the CUDA backend drops graphs that it did not use for 10 s
constexpr int     max_nodes_ahead    = 400; // well under the depth of a CUDA launch queue

// Adds the time from construction to destruction to a counter.
class Stopwatch {
  public:
    Stopwatch(int64_t & counter, bool enabled) : counter_(counter), start_(enabled ? now_ns() : 0), enabled_(enabled) {}

    ~Stopwatch() {
        if (enabled_) {
            counter_ += now_ns() - start_;
        }
    }

  private:
    int64_t & counter_;
    int64_t   start_;
    bool      enabled_;
};

bool is_pinned_weight(const ggml_tensor * tensor) {
    return ats_is_host_weight(tensor) && ats_is_pinned(tensor->buffer);
}

} // namespace

std::unique_ptr<Executor> Executor::create() {
    std::unique_ptr<Executor> executor(new Executor());
    executor->compute_.reset(ggml_backend_dev_init(ats_inner_device(), nullptr));
    executor->transfer_.reset(ggml_backend_dev_init(ats_inner_device(), nullptr));
    executor->experts_.reset(ggml_backend_dev_init(ats_inner_device(), nullptr));
    executor->cpu_.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    if (!executor->compute_ || !executor->transfer_ || !executor->experts_ || !executor->cpu_) {
        ats_fail("cannot start %s", ggml_backend_dev_name(ats_inner_device()));
        return nullptr;
    }
    ggml_backend_dev_props properties;
    ggml_backend_dev_get_props(ats_inner_device(), &properties);
    if (properties.caps.async && !properties.caps.events) {
        ats_fail("%s has no events to order copies by: build llama-cpp-python without GGML_CUDA_NO_PEER_COPY",
                 ggml_backend_dev_name(ats_inner_device()));
        return nullptr;
    }
    executor->ring_             = std::make_unique<WeightRing>(executor->compute_.get(), executor->transfer_.get());
    executor->copy_bridge_      = make_copy_bridge(executor->compute_.get(), executor->experts_.get());
    executor->zero_copy_bridge_ = make_zero_copy_bridge(executor->compute_.get(), executor->experts_.get());
    executor->expert_lane_      = std::make_unique<ExpertLane>(executor->experts_.get(), executor->cpu_.get());
    executor->settings_         = current_settings();
    return executor;
}

Executor::~Executor() {
    for (const ggml_backend_ptr * backend : {&transfer_, &experts_, &compute_}) {
        if (*backend) {
            ggml_backend_synchronize(backend->get());
        }
    }
}

void Executor::set_n_threads(int n_threads) {
    if (n_threads != n_threads_) {
        ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
        ggml_backend_cpu_set_threadpool(cpu_.get(), nullptr);
        threadpool_.reset(ggml_threadpool_new(&params));
        ggml_backend_cpu_set_threadpool(cpu_.get(), threadpool_.get());
        ggml_backend_cpu_set_n_threads(cpu_.get(), n_threads);
        if (ats_inner_device() == sim_device()) {
            sim_set_n_threads(compute_.get(), n_threads);
            sim_set_n_threads(experts_.get(), n_threads);
        }
        n_threads_ = n_threads;
    }
}

void Executor::set_abort_callback(ggml_abort_callback callback, void * data) {
    ggml_backend_cpu_set_abort_callback(cpu_.get(), callback, data);
}

Executor::CompiledProgram * Executor::find_or_compile(ggml_cgraph * graph) {
    const std::shared_ptr<const Settings> wanted = current_settings();
    if (wanted != settings_) {
        settings_ = wanted;
        programs_.clear();
    }
    choose_bridge();
    for (size_t i = 0; i < programs_.size(); i++) {
        CompiledProgram & known = *programs_[i];
        if (graph->uid != 0 && known.uid == graph->uid && known.template_graph.n_nodes == graph->n_nodes &&
            known.template_graph.nodes == graph->nodes) {
            std::rotate(programs_.begin() + static_cast<ptrdiff_t>(i), programs_.begin() + static_cast<ptrdiff_t>(i) + 1, programs_.end());
            return programs_.back().get();
        }
    }
    round_.n_compiles++;

    ScheduleRules rules;
    rules.is_host_weight = ats_is_host_weight;
    rules.streams        = [this](const ggml_tensor * weight, int64_t n_tokens) {
        const WeightClasses classes = settings_->classes_of(weight->name);
        return (n_tokens >= settings_->prefill_min_tokens ? classes.prefill : classes.decode) == ATS_STREAM;
    };
    rules.gpu_supports       = [](const ggml_tensor * node) { return ggml_backend_dev_supports_op(ats_inner_device(), node); };
    rules.cpu_supports       = [this](const ggml_tensor * node) { return ggml_backend_supports_op(cpu_.get(), node); };
    rules.prefill_min_tokens = settings_->prefill_min_tokens;
    // While decoding, copies take far longer than launches save: let neighbours share one, and the GPU fuse them.
    rules.ring_bytes  = [this](const ggml_tensor * weight) { return ring_->slot_bytes(weight); };
    rules.merge_bytes = static_cast<size_t>(settings_->ring_bytes) / 2;

    auto compiled            = std::make_unique<CompiledProgram>();
    compiled->uid            = graph->uid;
    compiled->template_graph = ggml_graph_view(graph, 0, graph->n_nodes);
    compiled->program        = compile_program(graph, rules);

    if (!compile_cpu_steps(*compiled)) {
        return nullptr;
    }
    for (size_t i = 0; i < compiled->program.operations.size(); i++) {
        compiled->launch_uids.push_back(ggml_graph_next_uid());
    }
    if (programs_.size() >= max_programs) {
        programs_.erase(programs_.begin());
    }
    programs_.push_back(std::move(compiled));
    return programs_.back().get();
}

// GPU kernels cannot read host memory that is not pinned.
void Executor::choose_bridge() {
    const bool zero_copy = settings_->zero_copy != 0 && zero_copy_bridge_ && arena_.is_pinned();
    bridge_              = zero_copy ? zero_copy_bridge_.get() : copy_bridge_.get();
}

bool Executor::compile_cpu_steps(CompiledProgram & compiled) {
    const std::vector<CpuStep> & steps = compiled.program.cpu_steps;
    std::vector<ExpertBlock>     blocks(steps.size()); // without nodes where the step is none
    std::vector<ExpertBlock>     expert_blocks;
    size_t                       needed = 0;
    // Prompts' classes may leave other blocks than those that decoding has memory for; and where that memory is the
    // ring's, a program has experts or streams.
    const bool may_share   = !settings_->streams_while_decoding();
    const bool has_experts = ExpertLane::is_wanted(*settings_) && (!compiled.program.is_prefill || compiled.program.n_tokens == 1) &&
                             (!may_share || compiled.program.streams.empty());
    for (size_t i = 0; i < steps.size(); i++) {
        if (has_experts && match_expert_block(steps[i], is_pinned_weight, blocks[i]) &&
            (blocks[i].n_tokens() == 1 || ExpertBatch::can_run(blocks[i], compiled.template_graph))) {
            expert_blocks.push_back(blocks[i]);
            continue;
        }
        blocks[i] = {};
        needed    = std::max(needed, Arena::bytes_for(steps[i]));
    }
    const int generation = expert_lane_->generation();
    if (!expert_blocks.empty() && !expert_lane_->prepare(expert_blocks, *settings_, *ring_, may_share)) {
        return false;
    }
    if (generation != expert_lane_->generation()) {
        programs_.clear();
        experts_hold_ring_ = false;
    }
    if (!expert_blocks.empty()) {
        give_ring_to_experts(); // compiling runs graphs there
    }
    if (needed > arena_.size_bytes()) {
        ggml_backend_synchronize(compute_.get());
        programs_.clear();
        if (!arena_.allocate(needed)) {
            return false;
        }
        choose_bridge();
    }
    const auto next_block = [&](size_t i) {
        const auto next = std::find_if(blocks.begin() + static_cast<ptrdiff_t>(i) + 1, blocks.end(), [](const ExpertBlock & block) { return !block.nodes.empty(); });
        return next == blocks.end() ? nullptr : &*next;
    };
    const bool is_late = std::any_of(expert_blocks.begin(), expert_blocks.end(), [](const ExpertBlock & block) { return block.n_tokens() > 1; });
    for (size_t i = 0; i < steps.size(); i++) {
        compiled.cpu_steps.emplace_back();
        CompiledStep & step = compiled.cpu_steps.back();
        if (!blocks[i].nodes.empty()) {
            step.experts = std::make_unique<ExpertLane::Step>();
        }
        const bool ok = step.experts != nullptr ? expert_lane_->compile(blocks[i], next_block(i), is_late, compiled.template_graph, *bridge_, *step.experts)
                                                : arena_.compile(steps[i], step.plain);
        if (!ok) {
            return false;
        }
    }
    return true;
}

ggml_status Executor::compute(ggml_cgraph * graph) {
    round_                              = {};
    ggml_status          status         = GGML_STATUS_SUCCESS;
    const RingCounters   before         = ring_->counters();
    const ExpertCounters experts_before = expert_lane_->counters();
    {
        Stopwatch         total(round_.total_ns, true);
        CompiledProgram * compiled = find_or_compile(graph);
        if (compiled == nullptr || !give_ring_to_streams(compiled->program)) {
            ats_fail("out of memory while preparing a graph of %d nodes", graph->n_nodes);
            return GGML_STATUS_ALLOC_FAILED;
        }
        const bool has_experts = compiled->has_experts();
        if (has_experts) {
            give_ring_to_experts();
        }
        ring_->set_timed(settings_->statistics != 0);
        note_run(*compiled);
        const bool is_token    = has_experts && compiled->program.n_tokens == 1;
        if (is_token) {
            expert_lane_->begin_token(*bridge_, *settings_);
        }
        const int64_t start = now_ns();
        status              = run(*compiled);
        if (is_token && compiled->n_runs > runs_before_early) {
            expert_lane_->end_token(now_ns() - start);
        }
        round_base_ += static_cast<uint32_t>(compiled->program.cpu_steps.size());
    }
    const ExpertCounters & experts = expert_lane_->counters();
    round_.streamed_bytes = ring_->counters().copied_bytes - before.copied_bytes + experts.bytes - experts_before.bytes;
    round_.n_streamed     = ring_->counters().n_copies - before.n_copies;
    round_.n_slot_stalls  = ring_->counters().n_stalls - before.n_stalls;
    round_.link_busy_ns   = ring_->counters().busy_ns - before.busy_ns;

    round_.n_experts_resident = experts.n_resident - experts_before.n_resident;
    round_.n_experts_streamed = experts.n_streamed - experts_before.n_streamed;
    round_.n_experts_cpu      = experts.n_cpu - experts_before.n_cpu;
    round_.expert_cpu_ns      = experts.cpu_ns - experts_before.cpu_ns;
    round_.expert_gpu_ns      = experts.gpu_ns - experts_before.gpu_ns;
    round_.expert_decide_ns   = experts.decide_ns - experts_before.decide_ns;

    round_.n_experts_predicted      = experts.n_predicted - experts_before.n_predicted;
    round_.n_experts_predicted_used = experts.n_predicted_used - experts_before.n_predicted_used;
    round_.ring_bytes         = static_cast<int64_t>(ring_->size_bytes());
    round_.pinned_bytes       = static_cast<int64_t>(arena_.size_bytes());
    round_.expert_bytes       = expert_lane_->size_bytes();
    round_.n_graphs           = 1;
    add_statistics(round_);
    return status;
}

void Executor::give_ring_to_experts() {
    if (expert_lane_->shares_ring() && !experts_hold_ring_) {
        ring_->lend(static_cast<size_t>(settings_->ring_bytes)); // which was had before
        expert_lane_->forget_slots();
        experts_hold_ring_ = true;
    }
}

// False: out of memory. If the ring moves, experts lose their place in it.
bool Executor::give_ring_to_streams(const Program & program) {
    if (!program.streams.empty() && experts_hold_ring_) {
        ggml_backend_synchronize(experts_.get());
        ggml_backend_synchronize(compute_.get());
        experts_hold_ring_ = false;
    }
    const bool ok = ring_->set_sequence(program, static_cast<size_t>(settings_->ring_bytes));
    if (expert_lane_->shares_ring() && expert_lane_->ring_generation() != ring_->generation()) {
        expert_lane_->free_memory();
        const auto has_experts = [](const std::unique_ptr<CompiledProgram> & compiled) { return compiled->has_experts(); };
        programs_.erase(std::remove_if(programs_.begin(), programs_.end(), has_experts), programs_.end());
    }
    return ok;
}

// After a pause, CUDA graphs have to be captured anew, and that must not happen while the GPU waits for the host.
void Executor::note_run(CompiledProgram & compiled) {
    const int64_t now = now_ns();
    if (compiled.n_runs > 0 && now - compiled.last_run_ns > long_pause_ns) {
        compiled.n_runs = 0;
        if (!expert_lane_->shares_ring() || experts_hold_ring_) {
            expert_lane_->warm_up(*bridge_);
        }
    }
    compiled.n_runs++;
    compiled.last_run_ns = now;
}

ggml_status Executor::run(CompiledProgram & compiled) {
    const std::vector<Operation> & operations = compiled.program.operations;
    // A copy from pageable memory may wait for the GPU, which must not be waiting for the host then.
    const bool early = settings_->early_launch != 0 && bridge_->can_fetch_early() &&
                       compiled.n_runs > runs_before_early && ats_unpinned_bytes() == 0;
    size_t     next  = 0; // first operation that was not enqueued yet
    ggml_status status = GGML_STATUS_SUCCESS;
    for (size_t i = 0; i < operations.size() && status == GGML_STATUS_SUCCESS; i++) {
        if (operations[i].kind != OperationKind::compute) {
            if (i >= next) {
                status = enqueue(compiled, i);
                next   = i + 1;
            }
            continue;
        }
        // The GPU is still busy with this step's inputs: hand it what comes after the step meanwhile.
        next = std::max(next, i + 1);
        for (int n_nodes = 0; early && next < operations.size() && operations[next].kind != OperationKind::compute; next++) {
            n_nodes += operations[next].last - operations[next].first;
            if (n_nodes > max_nodes_ahead || status != GGML_STATUS_SUCCESS) {
                break;
            }
            status = enqueue(compiled, next);
        }
        const ggml_status computed = compute_step(compiled, operations[i]);
        status                     = status == GGML_STATUS_SUCCESS ? computed : status;
    }
    if (status != GGML_STATUS_SUCCESS) {
        bridge_->abandon(round_base_ + static_cast<uint32_t>(compiled.program.cpu_steps.size()));
    }
    return status;
}

void Executor::prefetch(const CompiledProgram & compiled) {
    if (settings_->prefetch != 0) {
        Stopwatch stopwatch(round_.copy_issue_ns, settings_->statistics != 0);
        ring_->prefetch(static_cast<int>(compiled.program.streams.size()), expert_lane_->shares_ring());
    }
}

ggml_status Executor::enqueue(CompiledProgram & compiled, size_t index) {
    const Operation & operation = compiled.program.operations[index];
    const bool        timed     = settings_->statistics != 0;
    if (operation.kind == OperationKind::launch) {
        prefetch(compiled);
        Stopwatch stopwatch(round_.launch_ns, timed);
        round_.n_gpu_steps++;
        ggml_cgraph view = compiled.template_graph;
        view.nodes       = compiled.program.gpu_nodes.data() + operation.first;
        view.n_nodes     = operation.last - operation.first;
        view.uid         = compiled.launch_uids[index];
        return ring_->with_weights(compiled.program, operation.first_stream, operation.last_stream,
                                   [&] { return ggml_backend_graph_compute_async(compute_.get(), &view); });
    }
    Stopwatch            stopwatch(round_.launch_ns, timed);
    const CompiledStep & step  = compiled.cpu_steps[operation.cpu_step];
    const uint32_t       round = round_of(operation);
    bool                 ok    = true;
    if (operation.kind == OperationKind::publish) {
        ok = bridge_->publish(count_bytes(step.inputs()), round);
        ok = ok && (step.experts == nullptr || bridge_->start_experts(expert_lane_->share(*step.experts), round));
    } else if (step.experts == nullptr) {
        ok = bridge_->fetch(count_bytes(step.plain.outputs), round);
    } else {
        round_.activation_bytes += static_cast<int64_t>(ggml_nbytes(step.experts->join.result));
        ok = bridge_->join_experts(step.experts->join, round);
    }
    return ok ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

const std::vector<Crossing> & Executor::count_bytes(const std::vector<Crossing> & crossings) {
    for (const Crossing & crossing : crossings) {
        round_.activation_bytes += static_cast<int64_t>(crossing.bytes);
    }
    return crossings;
}

ggml_status Executor::compute_step(CompiledProgram & compiled, const Operation & operation) {
    const bool timed = settings_->statistics != 0;
    prefetch(compiled); // the last launch may have made room, and nothing can be issued during the step
    {
        Stopwatch stopwatch(round_.wait_gpu_ns, timed);
        if (!bridge_->wait_published(round_of(operation))) {
            return GGML_STATUS_FAILED;
        }
    }
    Stopwatch stopwatch(round_.cpu_ns, timed);
    round_.n_cpu_steps++;
    const CompiledStep & step   = compiled.cpu_steps[operation.cpu_step];
    const ggml_status    status = step.experts != nullptr ? expert_lane_->run(*step.experts, *bridge_, round_of(operation))
                                                          : ggml_backend_graph_compute(cpu_.get(), step.plain.graph);
    bridge_->mark_computed(round_of(operation));
    if (step.experts != nullptr && status == GGML_STATUS_SUCCESS) {
        expert_lane_->look_ahead(*step.experts, *bridge_, round_of(operation));
    }
    return status;
}
