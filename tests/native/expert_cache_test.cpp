// The policy of the expert cache: counts fade, the least used one goes, and what is in use stays. What is learnt of times. And
// how the experts of several tokens are divided.
#include "expert_cache.h"
#include "expert_division.h"
#include "prediction_trial.h"
#include "time_curve.h"

#include <cstdio>
#include <cstdlib>

static void check(bool ok, const char * what) {
    if (!ok) {
        printf("failed: %s\n", what);
        exit(1);
    }
}

// Two layers of three experts.
static ExpertCache make_cache(int n_slots) {
    ExpertCache cache(n_slots);
    check(cache.add_layer(3) == 0 && cache.add_layer(3) == 3, "experts are numbered through all layers");
    return cache;
}

// One layer of one token: uses the experts, and admits those that are missing. Returns the number of hits.
static int route(ExpertCache & cache, const int * experts, int n) {
    int hits = 0;
    cache.begin_round();
    for (int i = 0; i < n; i++) {
        hits += cache.use(experts[i]) >= 0;
    }
    for (int i = 0; i < n; i++) {
        if (cache.use(experts[i]) < 0) {
            cache.admit(experts[i]);
        }
    }
    return hits;
}

static void test_slots_fill_before_anything_is_replaced() {
    ExpertCache cache = make_cache(3);
    for (int expert = 0; expert < 3; expert++) {
        cache.begin_round();
        check(cache.use(expert) == -1, "an empty cache holds nothing");
        check(cache.admit(expert) == expert, "empty slots are taken in order");
    }
    for (int expert = 0; expert < 3; expert++) {
        cache.begin_round();
        check(cache.use(expert) == expert, "what was admitted is found");
        check(cache.use(3 + expert) == -1, "layers are apart");
    }
}

static void test_the_least_used_one_goes() {
    ExpertCache cache = make_cache(2);
    const int   often[] = {0}, seldom[] = {1}, rival[] = {2};
    route(cache, often, 1);
    route(cache, seldom, 1);
    for (int i = 0; i < 5; i++) {
        check(route(cache, often, 1) == 1, "a cached expert is a hit");
    }
    for (int i = 0; i < 3; i++) {
        route(cache, rival, 1);
    }
    check(route(cache, rival, 1) == 1, "an expert used more often than the least used one replaces it");
    check(route(cache, often, 1) == 1, "the most used one stays");
    check(route(cache, seldom, 1) == 0, "the least used one is gone");
}

static void test_equals_do_not_replace_each_other() {
    ExpertCache cache = make_cache(1);
    const int   a[] = {0}, b[] = {1};
    route(cache, a, 1);
    route(cache, b, 1);
    check(route(cache, a, 1) == 1, "as many uses are not enough to replace");
}

static void test_what_this_round_uses_stays() {
    ExpertCache cache = make_cache(1);
    const int   a[] = {0}, b[] = {1};
    route(cache, a, 1);
    for (int i = 0; i < 4; i++) {
        cache.begin_round();
        cache.use(1); // many uses of another, without copying it
    }
    cache.begin_round();
    check(cache.use(0) == 0, "still there");
    cache.use(1);
    check(cache.admit(1) == -1, "the slot is in use in this round");
    check(route(cache, b, 1) == 0, "not admitted in that round");
    check(route(cache, b, 1) == 1, "but in the next one");
}

static void test_old_uses_fade() {
    ExpertCache cache = make_cache(1);
    const int   old[] = {0}, recent[] = {1};
    for (int i = 0; i < 100; i++) {
        route(cache, old, 1);
    }
    const int idle = 400000; // rounds; many uses are worth e^-8 then
    for (int i = 0; i < idle; i++) {
        cache.begin_round();
    }
    route(cache, recent, 1);
    check(route(cache, recent, 1) == 1, "one use now is worth more than a hundred long ago");
}

static void test_ageing_does_not_overflow() {
    ExpertCache cache = make_cache(2);
    const int   a[] = {0}, b[] = {1};
    route(cache, a, 1);
    route(cache, b, 1);
    const int n_rounds = 12000000; // the weight passes its limit
    for (int i = 0; i < n_rounds; i++) {
        cache.begin_round();
    }
    check(route(cache, a, 1) == 1 && cache.score(0) > cache.score(1), "scores stay comparable");
    check(cache.score(0) < 1e101, "scores stay finite");
}

static void test_no_slots() {
    ExpertCache cache = make_cache(0);
    const int   a[] = {0};
    check(route(cache, a, 1) == 0 && route(cache, a, 1) == 0, "no slots, no hits");
}

static void test_times_are_learnt() {
    TimeCurve curve({0, 10, 20, 30, 40});
    check(curve.at(2) == 20, "the prior comes first");
    for (int i = 0; i < 1000; i++) {
        curve.add(2, 40);
    }
    check(curve.at(2) > 39.9 && curve.at(2) < 40.1, "measurements replace it");
    check(curve.at(3) > 50 && curve.at(1) > 18 && curve.at(4) > 60, "neighbours follow, so that no prior is left alone");
    const double before = curve.at(2);
    curve.add(2, 1e9);
    check(curve.at(2) < 1.06 * before, "an interruption says little");
    for (int i = 0; i < 2000; i++) {
        curve.add(3, 15);
    }
    check(curve.at(2) < 12, "a mean that is not measured any more follows its neighbours");
}

// Decodes tokens that take these times; returns how many of the last 100 were predicted.
static int predicted(PredictionTrial & trial, int n_tokens, int without, int with) {
    int n = 0;
    for (int i = 0; i < n_tokens; i++) {
        n += i >= n_tokens - 100 && trial.is_on();
        trial.add((trial.is_on() ? with : without) + (i % 7 == 0 ? 500 : i % 3)); // and noise
    }
    return n;
}

static void test_prediction_stays_where_it_pays() {
    PredictionTrial trial;
    check(!trial.is_on() && predicted(trial, 64, 1000, 900) > 0, "both are tried");
    check(predicted(trial, 500, 1000, 900) == 100, "it pays");
    check(predicted(trial, 800, 1000, 1100) == 0, "it is tried again, and does not pay any more");
    check(predicted(trial, 1200, 1000, 995) == 0, "hardly better is not enough");
}

static void test_what_must_be_admitted_is() {
    ExpertCache cache = make_cache(2);
    const int   often[] = {0, 1};
    for (int i = 0; i < 5; i++) {
        route(cache, often, 2);
    }
    cache.begin_round();
    cache.use(0);
    check(cache.admit(2) == -1 && cache.admit(2, true) == cache.slot_of(2), "although others are worth more");
    check(cache.slot_of(0) >= 0 && cache.slot_of(1) == -1, "but not in place of what this round uses");
    check(cache.admit(3, true) == -1, "which is everything now");
    check(route(cache, often, 2) == 1 && route(cache, often, 2) == 2, "what was worth more comes back");
}

static void test_the_ratio_of_times_is_learnt() {
    RunningRatio ratio;
    for (int i = 0; i < 100; i++) {
        ratio.add(30, 10);
    }
    check(ratio.value() > 2.9 && ratio.value() < 3.1, "to the expected one");
    ratio.add(1e9, 10);
    check(ratio.value() < 4, "an interruption says little");
}

static void test_columns_of_several_tokens() {
    const int32_t  ids[] = {4, 1, -7, 1, 3, -7, 3, 1, -7, 4, 3}; // of four tokens, with something in between
    ExpertDivision division;
    division.collect(ids, 3, 2, 4, 5);
    check(division.uses.size() == 3, "every expert once");
    for (ExpertDivision::Use & use : division.uses) {
        check(use.n_columns == (use.expert == 4 ? 2 : 3) && use.slot == -1, "with all its columns");
        use.slot = use.expert == 1 ? 0 : -1;
    }
    int32_t sources[8], slots[8], on_cpu[8];
    check(division.place(3, sources, slots, on_cpu) == 5, "the others are the CPU's");
    const int32_t expected_sources[] = {~0, 1, 2, ~1, ~2, 5, ~3, ~4}, expected_slots[] = {1, 0, 0, 1, 1, 0, 1, 2};
    const int32_t expected_experts[] = {4, 3, 3, 4, 3}, expected_tokens[] = {0, 1, 2, 3, 3};
    for (int c = 0; c < 8; c++) {
        check(sources[c] == expected_sources[c], "who makes a column");
        check(slots[c] == expected_slots[c], "no token uses a slot twice, and a slot in use gets no others' columns");
    }
    for (int i = 0; i < 5; i++) {
        check(on_cpu[i] == expected_experts[i] && division.token_of(i) == expected_tokens[i], "whose input it has");
    }
    check(division.place(2, sources, slots, on_cpu) == 5 && slots[6] == 1 && slots[7] == 0, "unless there are too few");
}

static void test_link_and_cpu_end_together() {
    ExpertDivision::Use                many = {0, 7, -1}, two = {1, 2, -1}, one = {2, 1, -1};
    std::vector<ExpertDivision::Use *> missing = {&many, &two, &one};
    const DivisionTimes                times   = {6, 1, 5}; // 6 + 6, 6 + 1 and 6 on the CPU
    check(times.n_to_stream(missing, 9) == 2, "25 against 1; 13 against 6; 6 against 11; 0 against 16");
    check(times.n_to_stream(missing, 1) == 1, "no more than there is room for");
    check(DivisionTimes({6, 100, 5}).n_to_stream(missing, 9) == 0 && times.n_to_stream({}, 9) == 0, "nothing");
}

int main() {
    test_what_must_be_admitted_is();
    test_the_ratio_of_times_is_learnt();
    test_columns_of_several_tokens();
    test_link_and_cpu_end_together();
    test_prediction_stays_where_it_pays();
    test_times_are_learnt();
    test_slots_fill_before_anything_is_replaced();
    test_the_least_used_one_goes();
    test_equals_do_not_replace_each_other();
    test_what_this_round_uses_stays();
    test_old_uses_fade();
    test_ageing_does_not_overflow();
    test_no_slots();
    printf("all passed\n");
    return 0;
}
