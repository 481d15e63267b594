#include "statistics.h"

#include "device.h"
#include "error.h"

#include <mutex>

static std::mutex     mutex;
static ats_statistics totals = {};

// Amounts held at one moment, which are not added up.
static constexpr int64_t ats_statistics::*amounts[] = {
    &ats_statistics::ring_bytes,
    &ats_statistics::pinned_bytes,
    &ats_statistics::expert_bytes,
};

void add_statistics(const ats_statistics & graph) {
    static_assert(sizeof(ats_statistics) % sizeof(int64_t) == 0, "counters only");
    std::lock_guard<std::mutex> lock(mutex);
    const int64_t *             from = reinterpret_cast<const int64_t *>(&graph);
    int64_t *                   to   = reinterpret_cast<int64_t *>(&totals);
    for (size_t i = 0; i < sizeof(ats_statistics) / sizeof(int64_t); i++) {
        to[i] += from[i];
    }
    for (const auto amount : amounts) {
        totals.*amount = graph.*amount;
    }
}

int ats_get_statistics(ats_statistics * out, bool reset) {
    if (out == nullptr) {
        return ats_fail("ats_get_statistics: null argument");
    }
    std::lock_guard<std::mutex> lock(mutex);
    *out                = totals;
    out->unpinned_bytes = ats_unpinned_bytes();
    if (reset) {
        totals = {};
        for (const auto amount : amounts) {
            totals.*amount = out->*amount;
        }
    }
    return 0;
}
