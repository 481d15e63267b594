// What the process asked of the hybrid device: classes of host weights and options.
#pragma once

#include "atsplan.h"

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>

struct WeightClasses {
    ats_class decode  = ATS_CPU;
    ats_class prefill = ATS_STREAM;
};

struct Settings {
    std::unordered_map<std::string, WeightClasses> classes; // by tensor name

    int64_t ring_bytes         = 0;
    int64_t prefill_min_tokens = 32;
    int64_t prefetch           = 1;
    int64_t zero_copy          = 1;
    int64_t early_launch       = 1;
    int64_t fast_products      = 1;
    int64_t statistics         = 1;
    int64_t max_pinned_bytes   = 0; // of host memory; beyond it, memory is pageable

    // Expert by expert decoding, for expert blocks whose weights are all of class ATS_CPU. Off unless both times are set.
    int64_t expert_cache_bytes    = 0; // VRAM for hot experts
    int64_t expert_cpu_ns         = 0; // one more expert computed on the CPU
    int64_t expert_cpu_base_ns    = 0; // beyond that, once per block
    int64_t expert_link_ns        = 0; // one expert copied to VRAM
    int64_t expert_link_latency_ns = 0; // of the GPU's share beyond its copies
    int64_t expert_prediction      = 1; // 0: never, 1: where it makes tokens faster, 2: always

    // Of weights that are known by name.
    bool streams_while_decoding() const {
        return std::any_of(classes.begin(), classes.end(), [](const auto & entry) { return entry.second.decode == ATS_STREAM; });
    }

    WeightClasses classes_of(const char * name) const {
        const auto found = classes.find(name);
        return found == classes.end() ? WeightClasses() : found->second;
    }
};

// The settings in force. A new object is made for every change, so an executor compares pointers to notice one.
std::shared_ptr<const Settings> current_settings();

// Programs that cannot call the C API (llama-bench, llama-server) name a settings file in ATSPLAN_SETTINGS. Its lines:
//   option NAME VALUE
//   weight NAME DECODE PREFILL        classes as in the plan: stream or cpu
// Returns -1 with ats_last_error() set if the file is named but unusable.
int load_settings_file(const char * path);
