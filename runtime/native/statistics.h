// What all executors of the process did, for ats_get_statistics().
#pragma once

#include "atsplan.h"

// Add one graph's counters; what an executor holds "now" replaces the value before.
void add_statistics(const ats_statistics & graph);
