#include "ring.h"

#include <algorithm>
#include <numeric>

using Offsets = std::vector<size_t>;

// Behind each other, and from the start again where one does not fit.
static Offsets in_turn(const std::vector<size_t> & sizes, size_t ring_bytes) {
    Offsets offsets;
    size_t  next = 0;
    for (const size_t size : sizes) {
        if (next + size > ring_bytes) {
            next = 0;
        }
        offsets.push_back(next);
        next += size;
    }
    return offsets;
}

// A launch at the start, the next one at the end: any two that the ring has room for are apart.
static Offsets at_both_ends(const std::vector<size_t> & sizes, const std::vector<int> & launch_ends, size_t ring_bytes) {
    Offsets offsets;
    bool    is_at_start = true;
    while (offsets.size() < sizes.size()) {
        const auto first = sizes.begin() + static_cast<std::ptrdiff_t>(offsets.size());
        const auto last  = sizes.begin() + launch_ends[offsets.size()];
        size_t     next  = is_at_start ? 0 : ring_bytes - std::accumulate(first, last, size_t{0});
        for (auto size = first; size != last; ++size) {
            offsets.push_back(next);
            next += *size;
        }
        is_at_start = !is_at_start;
    }
    return offsets;
}

static std::vector<RingSlot> with_blockers(const Offsets & offsets, const std::vector<size_t> & sizes) {
    const int             n = static_cast<int>(sizes.size());
    std::vector<RingSlot> slots;
    for (int i = 0; i < n; i++) {
        int distance = 1;
        for (; distance < n; distance++) {
            const int  j        = (i - distance + n) % n;
            const bool disjoint = offsets[j] + sizes[j] <= offsets[i] || offsets[i] + sizes[i] <= offsets[j];
            if (!disjoint) {
                break;
            }
        }
        slots.push_back({offsets[i], distance});
    }
    return slots;
}

std::vector<RingSlot> layout_ring(const std::vector<size_t> & sizes, const std::vector<int> & launch_ends, size_t ring_bytes) {
    std::vector<RingSlot> slots = with_blockers(in_turn(sizes, ring_bytes), sizes);
    if (sizes.empty() || 3 * *std::max_element(sizes.begin(), sizes.end()) <= ring_bytes) {
        return slots;
    }
    std::vector<RingSlot> others = with_blockers(at_both_ends(sizes, launch_ends, ring_bytes), sizes);
    const auto            ahead  = [](const std::vector<RingSlot> & layout) { // how far copies get ahead, on average
        return std::accumulate(layout.begin(), layout.end(), 0, [](int sum, const RingSlot & slot) { return sum + slot.blocker_distance; });
    };
    return ahead(others) > ahead(slots) ? others : slots;
}
