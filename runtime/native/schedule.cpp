#include "schedule.h"

#include "ggml-impl.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace {

enum class Lane { none, gpu, cpu };

bool is_matmul(const ggml_tensor * node) {
    return node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
}

// Cheap operations that write a tensor of their own and can move to the CPU between two CPU matmuls.
bool is_elementwise(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_GLU:
        case GGML_OP_UNARY:
        case GGML_OP_MUL:
        case GGML_OP_ADD:
        case GGML_OP_SCALE:
            return node->view_src == nullptr;
        default:
            return false;
    }
}

bool overlaps(const ggml_tensor * a, const ggml_tensor * b) {
    if (a->data == nullptr || b->data == nullptr) {
        return false; // not allocated: the graph is only being inspected
    }
    const char * a_begin = static_cast<const char *>(a->data);
    const char * b_begin = static_cast<const char *>(b->data);
    return a_begin < b_begin + ggml_nbytes(b) && b_begin < a_begin + ggml_nbytes(a);
}

class Compiler {
  public:
    Compiler(ggml_cgraph * graph, const ScheduleRules & rules) : rules_(rules) {
        nodes_.assign(graph->nodes, graph->nodes + graph->n_nodes);
    }

    Program run() {
        count_tokens();
        assign_lanes();
        collect_users();
        move_elementwise_to_cpu();
        emit();
        find_outputs();
        return std::move(program_);
    }

  private:
    ggml_tensor * host_weight_of(const ggml_tensor * node) const {
        for (ggml_tensor * source : node->src) {
            if (source != nullptr && rules_.is_host_weight(source)) {
                return source;
            }
        }
        return nullptr;
    }

    void count_tokens() {
        for (const ggml_tensor * node : nodes_) {
            if (is_matmul(node) && rules_.is_host_weight(node->src[0])) {
                const int64_t n_tokens = node->op == GGML_OP_MUL_MAT ? node->ne[1] * node->ne[2] * node->ne[3] : node->ne[2];
                program_.n_tokens      = std::max(program_.n_tokens, n_tokens);
            }
        }
        program_.is_prefill = program_.n_tokens >= rules_.prefill_min_tokens;
    }

    bool is_streamed(const ggml_tensor * node) const {
        if (!is_matmul(node) || !rules_.is_host_weight(node->src[0]) || !rules_.gpu_supports(node)) {
            return false;
        }
        for (int i = 1; i < GGML_MAX_SRC; i++) { // only src[0] is swapped for its copy in VRAM
            if (node->src[i] != nullptr && rules_.is_host_weight(node->src[i])) {
                return false;
            }
        }
        return rules_.streams(node->src[0], program_.n_tokens);
    }

    void assign_lanes() {
        lanes_.resize(nodes_.size(), Lane::gpu);
        for (size_t i = 0; i < nodes_.size(); i++) {
            if (needs_no_work(nodes_[i])) {
                lanes_[i] = Lane::none;
            } else if (host_weight_of(nodes_[i]) != nullptr && !is_streamed(nodes_[i])) {
                lanes_[i] = Lane::cpu;
            }
        }
    }

    void collect_users() {
        for (size_t i = 0; i < nodes_.size(); i++) {
            if (lanes_[i] == Lane::none) {
                continue;
            }
            producers_[memory_root(nodes_[i])].push_back(i);
            for (ggml_tensor * source : nodes_[i]->src) {
                if (source != nullptr) {
                    users_[memory_root(source)].push_back(i);
                }
            }
        }
    }

    bool is_candidate(size_t i) const {
        return lanes_[i] == Lane::gpu && is_elementwise(nodes_[i]) && !(nodes_[i]->flags & GGML_TENSOR_FLAG_OUTPUT) &&
               rules_.cpu_supports(nodes_[i]);
    }

    // An activation between two CPU matmuls stays on the CPU: all its sources come from there and all its users are there.
    void move_elementwise_to_cpu() {
        std::vector<bool> wanted(nodes_.size(), false);
        for (size_t i = nodes_.size(); i-- > 0;) {
            const auto users = users_.find(nodes_[i]);
            if (!is_candidate(i) || users == users_.end()) {
                continue;
            }
            wanted[i] = std::all_of(users->second.begin(), users->second.end(),
                                    [&](size_t user) { return user > i && (lanes_[user] == Lane::cpu || wanted[user]); });
        }
        // If a node turns out not to be movable, the nodes that feed it were wanted in vain: repeat until none is left.
        for (bool changed = true; changed;) {
            changed = false;
            for (size_t i = 0; i < nodes_.size(); i++) {
                if (!wanted[i]) {
                    continue;
                }
                const bool sources_on_cpu = std::all_of(std::begin(nodes_[i]->src), std::end(nodes_[i]->src), [&](ggml_tensor * source) {
                    return source == nullptr || is_made_on_cpu(source, wanted);
                });
                const auto & users        = users_[nodes_[i]];
                const bool   users_on_cpu = std::all_of(users.begin(), users.end(), [&](size_t user) {
                    return lanes_[user] == Lane::cpu || wanted[user];
                });
                if (!sources_on_cpu || !users_on_cpu) {
                    wanted[i] = false;
                    changed   = true;
                }
            }
        }
        for (size_t i = 0; i < nodes_.size(); i++) {
            if (wanted[i]) {
                lanes_[i] = Lane::cpu;
            }
        }
    }

    bool is_made_on_cpu(ggml_tensor * tensor, const std::vector<bool> & wanted) const {
        const auto made = producers_.find(memory_root(tensor));
        return made != producers_.end() && std::all_of(made->second.begin(), made->second.end(), [&](size_t producer) {
            return lanes_[producer] == Lane::cpu || wanted[producer];
        });
    }

    bool reads_any(const ggml_tensor * node, const std::unordered_set<const ggml_tensor *> & roots) const {
        if (node->view_src != nullptr && roots.count(node->view_src) != 0) {
            return true;
        }
        return std::any_of(std::begin(node->src), std::end(node->src), [&](ggml_tensor * source) {
            return source != nullptr && roots.count(memory_root(source)) != 0;
        });
    }

    void emit() {
        for (size_t i = 0; i < nodes_.size(); i++) {
            switch (lanes_[i]) {
                case Lane::none:
                    emit_view(nodes_[i]);
                    break;
                case Lane::cpu:
                    emit_cpu(nodes_[i]);
                    break;
                case Lane::gpu:
                    emit_gpu(nodes_[i]);
                    break;
            }
        }
        close_cpu_step();
    }

    // Views cost nothing; they stay between their neighbours because the GPU's fusion patterns contain them.
    void emit_view(ggml_tensor * node) {
        if (open_step_ < 0 && !program_.operations.empty() && program_.operations.back().kind == OperationKind::launch) {
            append_to_launch(node);
        }
    }

    void emit_cpu(ggml_tensor * node) {
        if (open_step_ >= 0 && reads_any(node, hoisted_)) {
            close_cpu_step();
        }
        if (open_step_ < 0) {
            open_step_ = static_cast<int>(program_.cpu_steps.size());
            program_.cpu_steps.emplace_back();
            add_operation(OperationKind::publish, open_step_);
        }
        CpuStep & step = program_.cpu_steps[open_step_];
        for (ggml_tensor * source : node->src) {
            const bool is_input = source != nullptr && !rules_.is_host_weight(source) && made_in_step_.count(memory_root(source)) == 0 &&
                                  std::find(step.inputs.begin(), step.inputs.end(), source) == step.inputs.end();
            if (is_input) {
                step.inputs.push_back(source);
            }
        }
        step.nodes.push_back(node);
        made_in_step_.insert(memory_root(node));
    }

    void emit_gpu(ggml_tensor * node) {
        if (open_step_ >= 0) {
            const CpuStep & step    = program_.cpu_steps[open_step_];
            const bool      clashes = std::any_of(step.nodes.begin(), step.nodes.end(),
                                                  [&](ggml_tensor * made) { return overlaps(made, node); });
            if (clashes || reads_any(node, made_in_step_)) {
                close_cpu_step();
            } else {
                hoisted_.insert(memory_root(node));
            }
        }
        const bool   streamed = is_streamed(node);
        const size_t bytes    = streamed ? rules_.ring_bytes(node->src[0]) : 0;
        const bool   fresh    = program_.operations.empty() || program_.operations.back().kind != OperationKind::launch ||
                           (streamed && !may_merge(program_.operations.back(), bytes));
        if (fresh) {
            add_operation(OperationKind::launch, -1);
            launch_bytes_ = 0;
        }
        append_to_launch(node);
        if (streamed) {
            program_.streams.push_back({node, node->src[0]});
            program_.operations.back().last_stream++;
            launch_bytes_ += bytes;
        }
    }

    // A launch waits for all its streamed weights: merging saves launches but delays the first node.
    bool may_merge(const Operation & launch, size_t bytes) const {
        const bool has_streams = launch.last_stream > launch.first_stream;
        return !program_.is_prefill && has_streams && launch_bytes_ + bytes <= rules_.merge_bytes;
    }

    void append_to_launch(ggml_tensor * node) {
        program_.gpu_nodes.push_back(node);
        program_.operations.back().last = static_cast<int>(program_.gpu_nodes.size());
    }

    void add_operation(OperationKind kind, int cpu_step) {
        Operation operation;
        operation.kind         = kind;
        operation.cpu_step     = cpu_step;
        operation.first        = static_cast<int>(program_.gpu_nodes.size());
        operation.last         = operation.first;
        operation.first_stream = static_cast<int>(program_.streams.size());
        operation.last_stream  = operation.first_stream;
        program_.operations.push_back(operation);
    }

    void close_cpu_step() {
        if (open_step_ >= 0) {
            add_operation(OperationKind::compute, open_step_);
            add_operation(OperationKind::fetch, open_step_);
            open_step_ = -1;
            made_in_step_.clear();
            hoisted_.clear();
        }
    }

    void find_outputs() {
        for (CpuStep & step : program_.cpu_steps) {
            const std::unordered_set<const ggml_tensor *> inside(step.nodes.begin(), step.nodes.end());
            for (ggml_tensor * node : step.nodes) {
                const auto users  = users_.find(node);
                const bool leaves = (node->flags & GGML_TENSOR_FLAG_OUTPUT) || users == users_.end() ||
                                    std::any_of(users->second.begin(), users->second.end(),
                                                [&](size_t user) { return inside.count(nodes_[user]) == 0; });
                if (leaves) {
                    step.outputs.push_back(node);
                }
            }
        }
    }

    const ScheduleRules &                                           rules_;
    std::vector<ggml_tensor *>                                      nodes_;
    std::vector<Lane>                                               lanes_;
    std::unordered_map<const ggml_tensor *, std::vector<size_t>>    users_;     // by memory root
    std::unordered_map<const ggml_tensor *, std::vector<size_t>>    producers_; // by memory root
    Program                                                         program_;
    int                                                             open_step_    = -1;
    size_t                                                          launch_bytes_ = 0; // in the ring, of the last launch
    std::unordered_set<const ggml_tensor *>                         made_in_step_; // memory roots
    std::unordered_set<const ggml_tensor *>                         hoisted_;      // GPU results since the publish
};

} // namespace

bool needs_no_work(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE ||
           node->op == GGML_OP_TRANSPOSE || ggml_nelements(node) == 0;
}

Program compile_program(ggml_cgraph * graph, const ScheduleRules & rules) {
    return Compiler(graph, rules).run();
}
