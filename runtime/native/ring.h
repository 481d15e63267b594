// The layout of the ring: a region of VRAM through which streamed weights pass, cyclically and in order of use.
#pragma once

#include <stddef.h>
#include <vector>

struct RingSlot {
    size_t offset;
    // How many uses back (1 .. n, counted cyclically) the last use lies whose region overlaps this one. A copy may
    // start when that use's reader has finished. n means that only this slot's own previous round stands in the way.
    int blocker_distance;
};

// Give every streamed weight a fixed region, so that addresses repeat from token to token and CUDA graphs replay.
// `sizes` are padded sizes in order of use; `launch_ends` tells for each the end of its launch, as an index: those of one
// launch never overlap, if they fill half the ring at most. Every size must be at most ring_bytes.
std::vector<RingSlot> layout_ring(const std::vector<size_t> & sizes, const std::vector<int> & launch_ends, size_t ring_bytes);
