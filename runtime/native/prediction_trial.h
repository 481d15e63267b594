// Finds out, while tokens are decoded, whether copying predicted experts ahead makes them faster.
#pragma once

#include <stdint.h>
#include <vector>

class PredictionTrial {
  public:
    // Whether the next token should be decoded with prediction.
    bool is_on() const { return is_trying_ ? n_tokens_ / window % 2 == 1 : is_better_; }

    // That token took so long.
    void add(int64_t ns);

    // Try again: after a pause, the machine may be another one.
    void restart();

  private:
    static constexpr int    window        = 16;   // tokens with the same answer
    static constexpr int    settling      = 4;    // of them, those that are not counted: measured times settle
    static constexpr int    n_windows     = 4;    // without and with, in turn
    static constexpr int    tokens_between = 1000;
    static constexpr double worthwhile    = 0.97; // of the time without: less may be noise, and predicting has costs of its own

    int                  n_tokens_  = 0; // since the last change
    bool                 is_trying_ = true;
    bool                 is_better_ = false;
    std::vector<int64_t> ns_[2]; // without, with
};
