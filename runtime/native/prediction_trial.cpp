#include "prediction_trial.h"

#include <algorithm>
#include <stddef.h>

static double median(std::vector<int64_t> & values) {
    const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return static_cast<double>(*middle);
}

void PredictionTrial::add(int64_t ns) {
    if (is_trying_ && n_tokens_ % window >= settling) {
        ns_[is_on()].push_back(ns);
    }
    n_tokens_++;
    if (is_trying_ && n_tokens_ == n_windows * window) {
        is_better_ = median(ns_[1]) < worthwhile * median(ns_[0]);
        is_trying_ = false;
        n_tokens_  = 0;
    } else if (!is_trying_ && n_tokens_ == tokens_between) {
        restart();
    }
}

void PredictionTrial::restart() {
    is_trying_ = true;
    n_tokens_  = 0;
    ns_[0].clear();
    ns_[1].clear();
}
