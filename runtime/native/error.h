// The last error of each thread, as text for ats_last_error().
#pragma once

#include "atsplan.h"

// Store a printf-style message; returns -1 so that callers can write `return ats_fail(...)`.
int ats_fail(const char * format, ...) __attribute__((format(printf, 1, 2)));
