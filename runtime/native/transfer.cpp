#include "atsplan.h"

#include "error.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

// For a last CPU unit j, everything after it is on the GPU and has a fixed cost, so the best round so far that ends on
// the GPU is a minimum over j; the best one that ends on the CPU extends either.
int ats_choose_transfers(int32_t n, const double * cpu, const double * gpu, const double * crossing, const double * transfer,
                         const bool * resident, bool * on_gpu, double * seconds) {
    if (n < 0 || seconds == nullptr ||
        (n > 0 && (cpu == nullptr || gpu == nullptr || crossing == nullptr || transfer == nullptr || resident == nullptr || on_gpu == nullptr))) {
        return ats_fail("ats_choose_transfers: missing arrays");
    }
    constexpr double never = std::numeric_limits<double>::infinity();
    const size_t     count = static_cast<size_t>(n);
    // Index 0 stands for the start of the round, index i + 1 for unit i.
    std::vector<double> on_cpu(count + 1, never);       // [i]: the shortest round so far whose last unit is i, on the CPU
    std::vector<double> on_gpu_since(count + 1, never); // [j]: the shortest round so far with everything after j on the GPU
    std::vector<double> hidden_by(count + 1, 0.0);      // [j]: how much of it came after j
    std::vector<size_t> previous(count + 1, 0);         // [i]: the CPU unit before i on the shortest round that ends with i
    on_gpu_since[0] = 0.0;
    for (size_t i = 0; i < count; i++) {
        const double cross = i > 0 ? crossing[i] : 0.0;
        if (!resident[i]) {
            const size_t before = static_cast<size_t>(std::min_element(on_gpu_since.begin(), on_gpu_since.begin() + static_cast<std::ptrdiff_t>(i) + 1) - on_gpu_since.begin());
            const double stay   = i > 0 ? on_cpu[i] : 0.0;
            const double change = on_gpu_since[before] + cross;
            previous[i + 1]     = stay <= change ? i : before;
            on_cpu[i + 1]       = cpu[i] + std::min(stay, change);
        }
        if (i > 0) {
            on_gpu_since[i] = on_cpu[i];
        }
        if (!resident[i]) {
            for (size_t j = 0; j <= i; j++) {
                on_gpu_since[j] += std::max(transfer[i] - hidden_by[j], 0.0);
            }
        }
        on_gpu_since[i] += cross;
        hidden_by[i] += cross;
        for (size_t j = 0; j <= i; j++) {
            on_gpu_since[j] += gpu[i];
            hidden_by[j] += gpu[i];
        }
    }
    const auto best = std::min_element(on_gpu_since.begin(), on_gpu_since.begin() + static_cast<std::ptrdiff_t>(std::max<size_t>(count, 1)));
    size_t     last = static_cast<size_t>(best - on_gpu_since.begin());
    *seconds        = count > 0 ? *best : 0.0;
    if (count > 0 && on_cpu[count] < *seconds) {
        last     = count;
        *seconds = on_cpu[count];
    }
    std::fill(on_gpu, on_gpu + count, true);
    for (; last > 0; last = previous[last]) {
        on_gpu[last - 1] = false;
    }
    return 0;
}
