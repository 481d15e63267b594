// Unit tests of the two pure parts of the native helper: the compiler of schedules and the layout of the ring.
#include "ring.h"
#include "schedule.h"

#include "ggml-cpp.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>

static int n_failed = 0;

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            printf("FAILED %s:%d: %s\n", __FILE__, __LINE__, #condition);             \
            n_failed++;                                                               \
        }                                                                             \
    } while (0)

// A feed-forward block behind a norm: norm -> (gate, up) -> glu -> down -> add.
struct Block {
    ggml_context_ptr                   context;
    ggml_cgraph *                      graph;
    ggml_tensor *                      x, *norm, *gate, *up, *glu, *down, *sum;
    std::map<const ggml_tensor *, int> classes; // host weights: 's' stream, 'c' cpu

    static constexpr size_t padding = 256; // of every weight in the ring

    explicit Block(int n_tokens) : context(ggml_init({1 << 20, nullptr, true})) {
        ggml_context * c = context.get();
        x                = ggml_new_tensor_2d(c, GGML_TYPE_F32, 64, n_tokens);
        norm             = ggml_rms_norm(c, x, 1e-5f);
        up               = ggml_mul_mat(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 64, 256), norm);
        gate             = ggml_mul_mat(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 64, 256), norm);
        glu              = ggml_swiglu_split(c, gate, up);
        down             = ggml_mul_mat(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 256, 64), glu);
        sum              = ggml_add(c, down, x);
        graph            = ggml_new_graph(c);
        ggml_build_forward_expand(graph, sum);
    }

    void set(const ggml_tensor * matmul, int host_class) { classes[matmul->src[0]] = host_class; }

    Program compile(size_t merge_bytes = 0, int64_t prefill_min_tokens = 32) {
        ScheduleRules rules;
        rules.is_host_weight     = [this](const ggml_tensor * tensor) { return classes.count(tensor) != 0; };
        rules.streams            = [this](const ggml_tensor * weight, int64_t) { return classes.at(weight) == 's'; };
        rules.gpu_supports       = [](const ggml_tensor *) { return true; };
        rules.cpu_supports       = [](const ggml_tensor *) { return true; };
        rules.ring_bytes         = [](const ggml_tensor * weight) { return ggml_nbytes(weight) + padding; };
        rules.merge_bytes        = merge_bytes;
        rules.prefill_min_tokens = prefill_min_tokens;
        return compile_program(graph, rules);
    }
};

// "launch(norm) publish(norm) compute(gate) ..." with the block's names; a star marks streamed weights.
static std::string describe(const Program & program, const Block & block) {
    const std::map<const ggml_tensor *, std::string> names = {
        {block.x, "x"},     {block.norm, "norm"}, {block.gate, "gate"}, {block.up, "up"},
        {block.glu, "glu"}, {block.down, "down"}, {block.sum, "sum"},
    };
    std::string text;
    const auto  list = [&](auto begin, auto end) {
        std::string joined;
        for (auto node = begin; node != end; ++node) {
            joined += (joined.empty() ? "" : ",") + names.at(*node);
            for (const StreamUse & use : program.streams) {
                joined += use.node == *node ? "*" : "";
            }
        }
        return "(" + joined + ")";
    };
    for (const Operation & operation : program.operations) {
        const CpuStep * step = operation.cpu_step < 0 ? nullptr : &program.cpu_steps[operation.cpu_step];
        text += text.empty() ? "" : " ";
        switch (operation.kind) {
            case OperationKind::launch:
                text += "launch" + list(program.gpu_nodes.begin() + operation.first, program.gpu_nodes.begin() + operation.last);
                break;
            case OperationKind::publish:
                text += "publish" + list(step->inputs.begin(), step->inputs.end());
                break;
            case OperationKind::compute:
                text += "compute" + list(step->nodes.begin(), step->nodes.end());
                break;
            case OperationKind::fetch:
                text += "fetch" + list(step->outputs.begin(), step->outputs.end());
                break;
        }
    }
    return text;
}

static void expect(const Program & program, const Block & block, const std::string & wanted) {
    const std::string got = describe(program, block);
    if (got != wanted) {
        printf("FAILED\n  wanted %s\n  got    %s\n", wanted.c_str(), got.c_str());
        n_failed++;
    }
}

static void test_everything_resident() {
    Block block(1);
    expect(block.compile(), block, "launch(norm,gate,up,glu,down,sum)");
    CHECK(block.compile().n_tokens == 0);
}

static void test_streams_start_launches_of_their_own() {
    Block block(1);
    for (ggml_tensor * matmul : {block.gate, block.up, block.down}) {
        block.set(matmul, 's');
    }
    expect(block.compile(), block, "launch(norm) launch(gate*) launch(up*,glu) launch(down*,sum)");
    const size_t one = ggml_nbytes(block.gate->src[0]) + Block::padding;
    expect(block.compile(2 * one - 1), block, "launch(norm) launch(gate*) launch(up*,glu) launch(down*,sum)");
    expect(block.compile(2 * one), block, "launch(norm) launch(gate*,up*,glu) launch(down*,sum)");
    expect(block.compile(3 * one), block, "launch(norm) launch(gate*,up*,glu,down*,sum)");
}

static void test_prefill_never_merges() {
    Block block(64);
    for (ggml_tensor * matmul : {block.gate, block.up}) {
        block.set(matmul, 's');
    }
    const Program program = block.compile(1 << 30);
    CHECK(program.is_prefill && program.n_tokens == 64);
    expect(program, block, "launch(norm) launch(gate*) launch(up*,glu,down,sum)");
}

static void test_elementwise_stays_between_cpu_matmuls() {
    Block block(1);
    for (ggml_tensor * matmul : {block.gate, block.up, block.down}) {
        block.set(matmul, 'c');
    }
    expect(block.compile(), block, "launch(norm) publish(norm) compute(gate,up,glu,down) fetch(down) launch(sum)");
}

static void test_elementwise_leaves_if_the_gpu_needs_it() {
    Block block(1);
    block.set(block.gate, 'c');
    block.set(block.up, 'c');
    expect(block.compile(), block, "launch(norm) publish(norm) compute(gate,up) fetch(gate,up) launch(glu,down,sum)");
}

static void test_independent_gpu_work_runs_beside_the_cpu() {
    Block block(1);
    block.set(block.gate, 'c');
    block.set(block.up, 's');
    block.set(block.down, 'c');
    expect(block.compile(), block,
           "launch(norm) publish(norm) launch(up*) compute(gate) fetch(gate) launch(glu) publish(glu) compute(down) fetch(down) "
           "launch(sum)");
}

static void test_hoisting_respects_memory() {
    Block block(1);
    block.set(block.gate, 'c');
    float memory[1024];
    block.gate->data = block.up->data = memory; // would be overwritten by the gate's late arrival
    expect(block.compile(), block, "launch(norm) publish(norm) compute(gate) fetch(gate) launch(up,glu,down,sum)");
}

static void test_outputs_are_fetched() {
    Block block(1);
    block.set(block.down, 'c');
    ggml_set_output(block.down);
    expect(block.compile(), block, "launch(norm,gate,up,glu) publish(glu) compute(down) fetch(down) launch(sum)");
}

// The end of each use's launch: one weight of any size, or several that fill half the ring at most.
static std::vector<int> random_launches(std::mt19937 & random, const std::vector<size_t> & sizes, size_t ring) {
    std::vector<int> ends;
    for (size_t first = 0, last; first < sizes.size(); first = last) {
        size_t bytes = sizes[first];
        for (last = first + 1; last < sizes.size() && random() % 3 != 0 && 2 * (bytes + sizes[last]) <= ring; last++) {
            bytes += sizes[last];
        }
        ends.resize(last, static_cast<int>(last));
    }
    return ends;
}

static void test_ring_regions_are_free_when_copied() {
    std::mt19937 random(1);
    for (int round = 0; round < 2000; round++) {
        const int           n = 1 + static_cast<int>(random() % 12);
        std::vector<size_t> sizes(n);
        for (size_t & size : sizes) {
            size = 1 + random() % 40;
        }
        const size_t                ring  = *std::max_element(sizes.begin(), sizes.end()) + random() % 100;
        const std::vector<RingSlot> slots = layout_ring(sizes, random_launches(random, sizes, ring), ring);
        // Run three rounds; owner[b] is the latest use whose copy lies at byte b.
        std::vector<int> owner(ring, -1);
        for (int use = 0; use < 3 * n; use++) {
            const RingSlot & slot = slots[use % n];
            CHECK(slot.offset + sizes[use % n] <= ring);
            int newest = -1;
            for (size_t byte = slot.offset; byte < slot.offset + sizes[use % n]; byte++) {
                newest      = std::max(newest, owner[byte]);
                owner[byte] = use;
            }
            CHECK(slot.blocker_distance >= 1 && slot.blocker_distance <= n);
            if (use >= 2 * n) { // in steady state the blocker is exactly the newest use that is overwritten
                CHECK(use - slot.blocker_distance == newest);
            }
        }
    }
}

static void test_half_a_ring_never_blocks_itself() {
    std::mt19937 random(2);
    for (int round = 0; round < 2000; round++) {
        const int           n = 2 + static_cast<int>(random() % 12);
        std::vector<size_t> sizes(n);
        for (size_t & size : sizes) {
            size = 1 + random() % 40;
        }
        const size_t                ring     = 40 + random() % 140;
        const std::vector<int>      launches = random_launches(random, sizes, ring);
        const std::vector<RingSlot> slots    = layout_ring(sizes, launches, ring);
        for (int first = 0; first < n; first = launches[first]) {
            for (int use = first; use < launches[first]; use++) {
                CHECK(slots[use].blocker_distance > use - first); // nobody in the same launch stands in the way
            }
        }
    }
}

static void test_two_large_weights_are_apart() {
    const auto distances = [](const std::vector<size_t> & sizes, size_t ring) {
        std::vector<int> launches(sizes.size());
        std::iota(launches.begin(), launches.end(), 1);
        std::vector<int> found;
        for (const RingSlot & slot : layout_ring(sizes, launches, ring)) {
            found.push_back(slot.blocker_distance);
        }
        return found;
    };
    // In turn, the third would start at 0 and overlap both others. At both ends every copy has one launch to hide behind.
    CHECK((distances({5, 5, 7, 5, 5, 7}, 12) == std::vector<int>{2, 2, 2, 2, 2, 2}));
    CHECK((distances({2, 2, 2, 2, 2, 2}, 12) == std::vector<int>{6, 6, 6, 6, 6, 6}));
}

// For the planner's copy of the layout: one ring a line, and "size end blocker_distance" of its weights.
static void print_layouts() {
    std::mt19937 random(3);
    for (int round = 0; round < 2000; round++) {
        std::vector<size_t> sizes(1 + random() % 12);
        for (size_t & size : sizes) {
            size = 1 + random() % (1 + round % 40);
        }
        const size_t                ring     = *std::max_element(sizes.begin(), sizes.end()) + random() % 100;
        const std::vector<int>      launches = random_launches(random, sizes, ring);
        const std::vector<RingSlot> slots    = layout_ring(sizes, launches, ring);
        printf("%zu", ring);
        for (size_t i = 0; i < sizes.size(); i++) {
            printf(" %zu %d %d", sizes[i], launches[i], slots[i].blocker_distance);
        }
        printf("\n");
    }
}

int main(int n_arguments, char **) {
    if (n_arguments > 1) {
        print_layouts();
        return 0;
    }
    test_everything_resident();
    test_streams_start_launches_of_their_own();
    test_prefill_never_merges();
    test_elementwise_stays_between_cpu_matmuls();
    test_elementwise_leaves_if_the_gpu_needs_it();
    test_independent_gpu_work_runs_beside_the_cpu();
    test_hoisting_respects_memory();
    test_outputs_are_fetched();
    test_ring_regions_are_free_when_copied();
    test_half_a_ring_never_blocks_itself();
    test_two_large_weights_are_apart();
    printf(n_failed == 0 ? "all passed\n" : "%d checks failed\n", n_failed);
    return n_failed == 0 ? 0 : 1;
}
