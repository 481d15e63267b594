#include "expert_division.h"

#include <algorithm>

void ExpertDivision::collect(const int32_t * ids, size_t stride, int n_used, int n_tokens, int n_experts) {
    uses.clear();
    n_used_ = n_used;
    use_of_expert_.assign(static_cast<size_t>(n_experts), -1);
    use_of_column_.resize(static_cast<size_t>(n_used * n_tokens));
    for (size_t c = 0; c < use_of_column_.size(); c++) {
        const size_t  columns = static_cast<size_t>(n_used);
        const int32_t expert  = ids[c / columns * stride + c % columns];
        int &         use     = use_of_expert_[static_cast<size_t>(expert)];
        if (use < 0) {
            use = static_cast<int>(uses.size());
            uses.push_back({expert, 0, -1});
        }
        uses[static_cast<size_t>(use)].n_columns++;
        use_of_column_[c] = use;
    }
}

int ExpertDivision::place(int n_slots, int32_t * sources, int32_t * slot_ids, int32_t * cpu_ids) {
    last_user_.assign(static_cast<size_t>(n_slots), -1); // tokens
    cpu_columns_.clear();
    find_fillers(n_slots);
    const auto use_of = [&](int column) -> const Use & { return uses[static_cast<size_t>(use_of_column_[static_cast<size_t>(column)])]; };
    const int  n      = static_cast<int>(use_of_column_.size());
    for (int first = 0; first < n; first += n_used_) {
        for (int c = first; c < first + n_used_; c++) {
            const Use & use = use_of(c);
            if (use.slot >= 0) {
                sources[c]  = c;
                slot_ids[c] = use.slot;
                last_user_[static_cast<size_t>(use.slot)] = first;
            }
        }
        size_t filler = 0;
        for (int c = first; c < first + n_used_; c++) {
            const Use & use = use_of(c);
            if (use.slot >= 0) {
                continue;
            }
            while (last_user_[static_cast<size_t>(fillers_[filler])] == first) {
                filler++;
            }
            slot_ids[c]                   = fillers_[filler++];
            sources[c]                    = ~static_cast<int32_t>(cpu_columns_.size());
            cpu_ids[cpu_columns_.size()] = use.expert;
            cpu_columns_.push_back(c);
        }
    }
    return static_cast<int>(cpu_columns_.size());
}

// Slots for columns that nobody reads, as many as a token has columns: first those that no token uses.
void ExpertDivision::find_fillers(int n_slots) {
    std::vector<bool> is_used(static_cast<size_t>(n_slots));
    for (const Use & use : uses) {
        if (use.slot >= 0) {
            is_used[static_cast<size_t>(use.slot)] = true;
        }
    }
    fillers_.clear();
    for (const bool wanted : {false, true}) {
        for (int32_t slot = 0; slot < n_slots && fillers_.size() < static_cast<size_t>(n_used_); slot++) {
            if (is_used[static_cast<size_t>(slot)] == wanted) {
                fillers_.push_back(slot);
            }
        }
    }
}

int DivisionTimes::n_to_stream(const std::vector<ExpertDivision::Use *> & missing, int limit) const {
    double on_cpu = 0.0;
    for (const ExpertDivision::Use * use : missing) {
        on_cpu += cpu(*use);
    }
    int    best      = 0;
    double best_time = std::max(gpu(0), on_cpu);
    for (int n = 1; n <= std::min(limit, static_cast<int>(missing.size())); n++) {
        on_cpu -= cpu(*missing[static_cast<size_t>(n) - 1]);
        const double time = std::max(gpu(n), on_cpu);
        if (time < best_time) {
            best      = n;
            best_time = time;
        }
    }
    return best;
}
