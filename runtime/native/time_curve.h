// How long things take: a prior, corrected by what is measured.
#pragma once

#include <algorithm>
#include <stddef.h>
#include <utility>
#include <vector>

// Of times to those expected.
class RunningRatio {
  public:
    double value() const { return value_; }

    void add(double ns, double expected_ns) {
        value_ += part * (std::min(ns / expected_ns, max_growth * value_) - value_);
    }

  private:
    static constexpr double part       = 0.2;
    static constexpr double max_growth = 2.0; // a round in which a thread was interrupted says little

    double value_ = 1.0;
};

// Of n things.
class TimeCurve {
  public:
    TimeCurve() = default;

    // prior_ns[n]: what n things are expected to take.
    explicit TimeCurve(std::vector<double> prior_ns) : prior_ns_(std::move(prior_ns)), ratios_(prior_ns_.size(), 1.0) {
        for (double & ns : prior_ns_) {
            ns = std::max(ns, 1.0); // ratios to it must exist
        }
    }

    // Of what was measured to the prior.
    double ratio(int n) const { return ratios_[static_cast<size_t>(n)]; }

    double at(int n) const { return prior_ns_[static_cast<size_t>(n)] * ratios_[static_cast<size_t>(n)]; }

    // A measurement corrects its neighbours too, the less the farther they are: what is never tried is not judged by its
    // prior alone, and a wrong mean does not keep itself from being tried again.
    void add(int n, double ns) {
        const double ratio = std::min(ns / prior_ns_[static_cast<size_t>(n)], max_growth * ratios_[static_cast<size_t>(n)]);
        for (size_t i = 0; i < ratios_.size(); i++) {
            double part = measured_part;
            for (int distance = static_cast<int>(i) - n; distance != 0; distance += distance < 0 ? 1 : -1) {
                part *= neighbour_part;
            }
            ratios_[i] += part * (ratio - ratios_[i]);
        }
    }

  private:
    static constexpr double measured_part  = 0.05;
    static constexpr double neighbour_part = 0.4;
    static constexpr double max_growth     = 2.0; // a round in which a thread was interrupted says little

    std::vector<double> prior_ns_, ratios_;
};
