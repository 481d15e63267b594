#include "ring.h"

std::vector<RingSlot> layout_ring(const std::vector<size_t> & sizes, size_t ring_bytes) {
    const int             n = static_cast<int>(sizes.size());
    std::vector<RingSlot> slots(n);
    size_t                next = 0;
    for (int i = 0; i < n; i++) {
        if (next + sizes[i] > ring_bytes) {
            next = 0;
        }
        slots[i].offset = next;
        next += sizes[i];
    }
    for (int i = 0; i < n; i++) {
        int distance = 1;
        for (; distance < n; distance++) {
            const int  j        = (i - distance + n) % n;
            const bool disjoint = slots[j].offset + sizes[j] <= slots[i].offset || slots[i].offset + sizes[i] <= slots[j].offset;
            if (!disjoint) {
                break;
            }
        }
        slots[i].blocker_distance = distance;
    }
    return slots;
}
