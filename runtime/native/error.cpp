#include "error.h"

#include <cstdarg>
#include <cstdio>

static thread_local char last_error[1024];

int ats_fail(const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return -1;
}

const char * ats_last_error(void) {
    return last_error;
}

int ats_api_version(void) {
    return ATS_API_VERSION;
}

const char * ats_build_stamp(void) {
#ifdef ATS_BUILD_STAMP
    return ATS_BUILD_STAMP;
#else
    return "";
#endif
}
