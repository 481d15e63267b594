// The hybrid device over small random graphs, with random classes of weights, against the CPU backend bit for bit.
// Built with sanitizers by test_sanitizers.py. `executor_test threads` also changes settings from a second thread.
#include "atsplan.h"
#include "device.h"
#include "expert_predictor.h"
#include "settings.h"

#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

extern "C" ggml_backend_reg_t ggml_backend_init(void);

namespace {

constexpr int64_t n_embd = 64, n_ff = 96, n_experts = 6, n_used = 3, n_layers = 3;

struct Weight {
    std::string        name;
    ggml_type          type;
    int64_t            ne[3];
    std::vector<char>  data;
};

// What a model file would hold.
struct Model {
    std::vector<Weight> weights;
    std::mt19937        random;

    explicit Model(unsigned seed, int64_t n_ff_dense = n_ff) : random(seed) {
        for (int layer = 0; layer < n_layers; layer++) {
            const std::string block = "blk." + std::to_string(layer) + ".";
            add(block + "norm", GGML_TYPE_F32, n_embd);
            for (const char * role : {"q", "k", "v", "o"}) {
                add(block + role, any_type(), n_embd, n_embd);
            }
            const int64_t count = layer >= 1 ? n_experts : 1; // all layers but the first route to experts
            if (count > 1) {
                add(block + "router", GGML_TYPE_F32, n_embd, n_experts);
            }
            const int64_t width = count > 1 ? n_ff : n_ff_dense;
            add(block + "gate", any_type(), n_embd, width, count);
            add(block + "up", any_type(), n_embd, width, count);
            add(block + "down", any_type(), width, n_embd, count);
        }
    }

    ggml_type any_type() {
        static const ggml_type types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1};
        return types[random() % 5];
    }

    void add(const std::string & name, ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1) {
        std::normal_distribution<float> values(0.0f, 0.2f);
        std::vector<float>              floats(static_cast<size_t>(ne0 * ne1 * ne2));
        for (float & value : floats) {
            value = values(random);
        }
        Weight weight{name, type, {ne0, ne1, ne2}, {}};
        weight.data.resize(ggml_row_size(type, ne0) * static_cast<size_t>(ne1 * ne2));
        ggml_quantize_chunk(type, floats.data(), weight.data.data(), 0, ne1 * ne2, ne0, nullptr);
        weights.push_back(std::move(weight));
    }
};

// The model's weights in memory, and graphs over them.
class Instance {
  public:
    // Every weight goes to one of `types`, which `place` chooses by its index.
    template <typename Place>
    Instance(const Model & model, ggml_backend_t backend, ggml_backend_buffer_type_t compute_type, Place place)
        : backend_(backend), weights_(ggml_init({ggml_tensor_overhead() * 64, nullptr, true})),
          allocator_(ggml_gallocr_new(compute_type)) {
        for (size_t i = 0; i < model.weights.size(); i++) {
            const Weight &             weight = model.weights[i];
            ggml_tensor *              tensor = ggml_new_tensor_3d(weights_.get(), weight.type, weight.ne[0], weight.ne[1], weight.ne[2]);
            ggml_backend_buffer_type_t type   = place(i);
            ggml_set_name(tensor, weight.name.c_str());
            buffers_.emplace_back(ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, tensor)));
            ggml_backend_buffer_set_usage(buffers_.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            ggml_backend_tensor_alloc(buffers_.back().get(), tensor, ggml_backend_buffer_get_base(buffers_.back().get()));
            ggml_backend_tensor_set(tensor, weight.data.data(), 0, weight.data.size());
        }
    }

    // As llama.cpp does, a graph is built anew for another number of tokens only.
    std::vector<float> compute(const std::vector<float> & input) {
        const int64_t n_tokens = static_cast<int64_t>(input.size()) / n_embd;
        if (n_tokens != n_tokens_) {
            build(n_tokens);
        }
        ggml_backend_tensor_set(input_, input.data(), 0, ggml_nbytes(input_));
        if (ggml_backend_graph_compute(backend_, graph_) != GGML_STATUS_SUCCESS) {
            printf("FAILED: %s\n", ats_last_error());
            return {};
        }
        std::vector<float> output(input.size());
        ggml_backend_tensor_get(output_, output.data(), 0, ggml_nbytes(output_));
        return output;
    }

  private:
    ggml_tensor * weight(int layer, const char * role) {
        return ggml_get_tensor(weights_.get(), ("blk." + std::to_string(layer) + "." + role).c_str());
    }

    void build(int64_t n_tokens) {
        n_tokens_ = n_tokens;
        nodes_.reset(ggml_init({ggml_tensor_overhead() * 512 + ggml_graph_overhead(), nullptr, true}));
        ggml_context * c = nodes_.get();
        input_           = ggml_new_tensor_2d(c, GGML_TYPE_F32, n_embd, n_tokens);
        ggml_set_input(input_);
        ggml_tensor * x = input_;
        for (int layer = 0; layer < n_layers; layer++) {
            x = ggml_add(c, x, attention(c, layer, ggml_mul(c, ggml_rms_norm(c, x, 1e-5f), weight(layer, "norm"))));
            x = ggml_add(c, x, layer >= 1 ? experts(c, layer, x) : feed_forward(c, layer, x));
        }
        output_ = x;
        ggml_set_output(output_);
        graph_ = ggml_new_graph(c);
        ggml_build_forward_expand(graph_, output_);
        graph_->uid = ggml_graph_next_uid();
        ggml_gallocr_alloc_graph(allocator_.get(), graph_);
    }

    ggml_tensor * attention(ggml_context * c, int layer, ggml_tensor * x) {
        ggml_tensor * q  = ggml_mul_mat(c, weight(layer, "q"), x);
        ggml_tensor * k  = ggml_mul_mat(c, weight(layer, "k"), x);
        ggml_tensor * v  = ggml_mul_mat(c, weight(layer, "v"), x);
        ggml_tensor * kq = ggml_soft_max(c, ggml_scale(c, ggml_mul_mat(c, k, q), 0.1f));
        return ggml_mul_mat(c, weight(layer, "o"), ggml_mul_mat(c, ggml_cont(c, ggml_transpose(c, v)), kq));
    }

    ggml_tensor * feed_forward(ggml_context * c, int layer, ggml_tensor * x) {
        ggml_tensor * gate = ggml_mul_mat(c, weight(layer, "gate"), x);
        ggml_tensor * up   = ggml_mul_mat(c, weight(layer, "up"), x);
        return ggml_mul_mat(c, weight(layer, "down"), ggml_swiglu_split(c, gate, up));
    }

    ggml_tensor * experts(ggml_context * c, int layer, ggml_tensor * x) {
        ggml_tensor * routed = ggml_soft_max(c, ggml_mul_mat(c, weight(layer, "router"), x));
        ggml_tensor * ids    = ggml_argsort_top_k(c, routed, n_used);
        ggml_tensor * shares = ggml_get_rows(c, ggml_reshape_3d(c, routed, 1, n_experts, n_tokens_), ids);
        ggml_tensor * column = ggml_reshape_3d(c, x, n_embd, 1, n_tokens_);
        ggml_tensor * gate   = ggml_mul_mat_id(c, weight(layer, "gate"), column, ids);
        ggml_tensor * up     = ggml_mul_mat_id(c, weight(layer, "up"), column, ids);
        ggml_tensor * down   = ggml_mul_mat_id(c, weight(layer, "down"), ggml_swiglu_split(c, gate, up), ids);
        ggml_tensor * each   = ggml_mul(c, down, shares);
        ggml_tensor * sum    = nullptr;
        for (int64_t i = 0; i < n_used; i++) {
            ggml_tensor * one = ggml_view_2d(c, each, n_embd, n_tokens_, each->nb[2], static_cast<size_t>(i) * each->nb[1]);
            sum               = sum == nullptr ? ggml_cont(c, one) : ggml_add(c, sum, one);
        }
        return sum;
    }

    ggml_backend_t                       backend_;
    ggml_context_ptr                     weights_, nodes_;
    std::vector<ggml_backend_buffer_ptr> buffers_;
    ggml_gallocr_ptr                     allocator_;
    ggml_cgraph *                        graph_    = nullptr;
    ggml_tensor *                        input_    = nullptr;
    ggml_tensor *                        output_   = nullptr;
    int64_t                              n_tokens_ = 0;
};

void choose_classes(const Model & model, std::mt19937 & random) {
    std::vector<const char *> names;
    std::vector<int32_t>      decode, prefill;
    const bool                decode_streams = random() % 2; // else single experts are kept in the ring, if it is large enough
    for (const Weight & weight : model.weights) {
        names.push_back(weight.name.c_str());
        decode.push_back(decode_streams && random() % 2 ? ATS_STREAM : ATS_CPU);
        prefill.push_back(random() % 2 ? ATS_STREAM : ATS_CPU);
    }
    ats_set_classes(names.data(), decode.data(), prefill.data(), static_cast<int32_t>(names.size()));
}

void choose_options(std::mt19937 & random) {
    const bool by_expert = random() % 2;
    ats_set_option("ring_bytes", static_cast<int64_t>(random() % 4) * (random() % 2 ? 40000 : 700000));
    ats_set_option("prefetch", random() % 2);
    ats_set_option("early_launch", random() % 2);
    ats_set_option("expert_cpu_ns", by_expert ? 1000 : 0);
    ats_set_option("expert_link_ns", by_expert ? 1 + random() % 3000 : 0);
    ats_set_option("expert_cache_bytes", random() % 2 ? 100000 : 0);
    ats_set_option("expert_prediction", random() % 3);
}

// Both lanes were used in every way, else a test that passes says little.
bool everything_was_used() {
    ats_statistics counters;
    ats_get_statistics(&counters, true);
    const int64_t used[] = {counters.n_cpu_steps, counters.n_gpu_steps, counters.n_streamed, counters.n_slot_stalls,
                            counters.n_experts_resident, counters.n_experts_streamed, counters.n_experts_cpu,
                            counters.n_experts_predicted, counters.n_experts_predicted_used};
    return std::find(std::begin(used), std::end(used), 0) == std::end(used);
}

// Bad arguments and bad settings files are refused.
bool refuses_bad_input() {
    const char *  names[] = {"a", nullptr};
    const int32_t classes[] = {ATS_CPU, ATS_CPU}, wrong[] = {ATS_CPU, 7};
    int64_t       value;
    bool          ok = ats_set_option(nullptr, 1) != 0 && ats_set_option("ring_bytes", -1) != 0 && ats_set_option("x", 1) != 0 &&
              ats_get_option("x", &value) != 0 && ats_get_option("prefetch", nullptr) != 0 && ats_get_statistics(nullptr, false) != 0 &&
              ats_set_classes(names, classes, classes, 2) != 0 && ats_set_classes(names, classes, wrong, 1) == 0 &&
              ats_set_classes(names, wrong + 1, classes, 1) != 0 && ats_set_classes(nullptr, classes, classes, 1) != 0 &&
              ats_set_classes(names, classes, classes, -1) != 0 && load_settings_file("/no/such/file") != 0;
    const std::string good = "option ring_bytes 4096\n\nweight blk.0.up stream cpu\n";
    const char *      path = "settings.txt";
    std::mt19937      random(0);
    int               n_refused = 0;
    for (int i = 0; i < 2000; i++) {
        std::string text = good;
        for (unsigned change = 0; i > 0 && change < 1 + random() % 3; change++) {
            const size_t at = random() % text.size();
            switch (random() % 3) {
                case 0: text[at] = static_cast<char>(random()); break;
                case 1: text.erase(at, 1 + random() % 9); break;
                case 2: text.insert(at, std::string(1 + random() % 300, static_cast<char>('0' + random() % 10))); break;
            }
            text += text.empty() ? "x" : "";
        }
        std::ofstream(path, std::ios::binary) << text;
        const bool refused = load_settings_file(path) != 0;
        n_refused += refused;
        ok = ok && (i > 0 || !refused);
    }
    return ok && n_refused > 100;
}

// A model on the CPU backend and on the hybrid device, fed alike.
class Pair {
  public:
    // `place` tells by a weight's index whether it lies in host memory.
    template <typename Place> Pair(const Model & model, Place place) : Pair(model, ggml_backend_reg_dev_get(ggml_backend_init(), 0), place) {}

    bool agrees(int64_t n_tokens, std::mt19937 & random) {
        std::normal_distribution<float> values;
        std::vector<float>              input(static_cast<size_t>(n_embd * n_tokens));
        for (float & value : input) {
            value = values(random);
        }
        ats_statistics before, after;
        ats_get_statistics(&before, false);
        const std::vector<float> a = expected_.compute(input), b = found_.compute(input);
        ats_get_statistics(&after, false);
        n_sharing_ += after.n_experts_streamed > before.n_experts_streamed && after.expert_bytes == prediction_scratch_bytes; // beside it
        return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    }

    // Rounds whose experts lay in the ring.
    int n_sharing() const { return n_sharing_; }

  private:
    template <typename Place>
    Pair(const Model & model, ggml_backend_dev_t device, Place place)
        : cpu_(ggml_backend_cpu_init()), hybrid_(ggml_backend_dev_init(device, nullptr)),
          expected_(model, cpu_.get(), ggml_backend_cpu_buffer_type(), [](size_t) { return ggml_backend_cpu_buffer_type(); }),
          found_(model, hybrid_.get(), ggml_backend_dev_buffer_type(device),
                 [&](size_t i) { return model.weights[i].ne[1] > 1 && place(i) ? ats_host_buffer_type() : ggml_backend_dev_buffer_type(device); }) {
        auto set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
            ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
        set_n_threads(hybrid_.get(), 1);
        ggml_backend_cpu_set_n_threads(cpu_.get(), 1);
    }

    ggml_backend_ptr cpu_, hybrid_;
    Instance         expected_, found_;
    int              n_sharing_ = 0;
};

bool run(unsigned seed, bool with_threads, int & n_sharing) {
    std::mt19937      random(seed);
    const Model       model(seed);
    Pair              pair(model, [&](size_t) { return random() % 4 != 0; });
    std::atomic<bool> done{false};
    std::thread       other;
    if (with_threads) {
        other = std::thread([&] {
            std::mt19937   own(seed + 1);
            ats_statistics counters;
            while (!done) {
                choose_classes(model, own);
                choose_options(own);
                ats_get_statistics(&counters, own() % 2);
                std::this_thread::yield();
            }
        });
    }
    bool ok = true;
    for (int round = 0; ok && round < 24; round++) {
        if (!with_threads && random() % 6 == 0) {
            choose_classes(model, random);
        }
        if (!with_threads && random() % 6 == 0) {
            choose_options(random);
        }
        ok = pair.agrees(random() % 2 ? 1 : random() % 2 ? 40 : 2 + random() % 8, random);
        if (!ok) {
            printf("FAILED: seed %u, round %d\n", seed, round);
        }
    }
    done = true;
    if (other.joinable()) {
        other.join();
    }
    n_sharing += pair.n_sharing();
    return ok;
}

// A wide matrix makes the ring larger than asked for. Experts notice that another size was asked for since they were there.
bool survives_sizes_in_between() {
    std::mt19937              random(0);
    const Model               model(0, 32768);
    Pair                      pair(model, [](size_t) { return true; });
    std::vector<const char *> names;
    for (const Weight & weight : model.weights) {
        names.push_back(weight.name.c_str());
    }
    const std::vector<int32_t> decode(names.size(), ATS_CPU), prefill(names.size(), ATS_STREAM);
    ats_set_classes(names.data(), decode.data(), prefill.data(), static_cast<int32_t>(names.size()));
    ats_set_option("expert_cpu_ns", 1000);
    ats_set_option("expert_link_ns", 1);
    ats_set_option("expert_cache_bytes", 0);
    bool ok = true;
    for (const auto & [ring_bytes, n_tokens] : {std::pair(800000, 40), {800000, 1}, {900000, 40}, {800000, 1}}) {
        ats_set_option("ring_bytes", ring_bytes);
        ok = ok && pair.agrees(n_tokens, random);
    }
    return ok && pair.n_sharing() == 2;
}

} // namespace

int main(int n_arguments, char ** arguments) {
    setenv("ATSPLAN_DEVICE", "sim", 1);
    const bool with_threads = n_arguments > 1 && strcmp(arguments[1], "threads") == 0;
    bool       ok           = true;
    int        n_sharing    = 0;
    for (unsigned seed = 0; ok && seed < 40; seed++) {
        ok = run(seed, with_threads, n_sharing);
    }
    if (!with_threads && ok) {
        ok = everything_was_used() && n_sharing > 0 && survives_sizes_in_between() && refuses_bad_input();
    }
    printf(ok ? "all passed\n" : "failed\n");
    return ok ? 0 : 1;
}
