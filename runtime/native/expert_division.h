// Where the routed experts of several tokens are computed, column by column. Pure bookkeeping.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <vector>

class ExpertDivision {
  public:
    struct Use {
        int32_t expert;
        int     n_columns;
        int     slot; // in VRAM; -1: on the CPU
    };

    // Column c = t * n_used + j belongs to the expert ids[t * stride + j], of n_experts. No expert has a slot yet.
    void collect(const int32_t * ids, size_t stride, int n_used, int n_tokens, int n_experts);

    // Once slots are given: sources[c] is c, or ~i for the CPU's i-th column, whose expert is cpu_ids[i]. slot_ids[c] is the
    // slot of column c; of the CPU's columns any that the token does not use, for GPUs do not allow a token to use one
    // twice: there must be more slots than a token has columns. As far as there are enough, it is one that no token uses,
    // for kernels depend on how many columns a slot has. Returns the number of the CPU's columns.
    int place(int n_slots, int32_t * sources, int32_t * slot_ids, int32_t * cpu_ids);

    // Of the CPU's i-th column.
    int token_of(int i) const { return cpu_columns_[static_cast<size_t>(i)] / n_used_; }

    std::vector<Use> uses; // distinct experts

  private:
    void find_fillers(int n_slots);

    int              n_used_ = 1;
    std::vector<int> use_of_expert_, use_of_column_, cpu_columns_, last_user_;
    std::vector<int32_t> fillers_; // slots
};

struct DivisionTimes {
    double cpu_ns;  // an expert with one column on the CPU
    double gpu_ns;  // the GPU's share without copies
    double link_ns; // of one expert

    static constexpr double more_columns = 1.0 / 6; // a further column of an expert that is being read anyway, to the first one

    double cpu(const ExpertDivision::Use & use) const { return cpu_ns * (1.0 + more_columns * (use.n_columns - 1)); }
    double gpu(int n_streamed) const { return gpu_ns + n_streamed * link_ns; }

    // The number of the missing experts, from the first one on, that lets link and CPU end together; at most `limit`.
    int n_to_stream(const std::vector<ExpertDivision::Use *> & missing, int limit) const;
};
