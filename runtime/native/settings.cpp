#include "settings.h"

#include "error.h"

#include <fstream>
#include <mutex>
#include <sstream>
#include <string.h>

static std::mutex                      settings_mutex;
static std::shared_ptr<const Settings> settings_in_force = std::make_shared<Settings>();

std::shared_ptr<const Settings> current_settings() {
    std::lock_guard<std::mutex> lock(settings_mutex);
    return settings_in_force;
}

static void replace_settings(Settings && settings) {
    settings_in_force = std::make_shared<const Settings>(std::move(settings));
}

static int64_t * find_option(Settings & settings, const char * name) {
    const struct {
        const char * name;
        int64_t *    value;
    } options[] = {
        {"ring_bytes", &settings.ring_bytes},     {"prefill_min_tokens", &settings.prefill_min_tokens},
        {"prefetch", &settings.prefetch},         {"zero_copy", &settings.zero_copy},
        {"early_launch", &settings.early_launch}, {"statistics", &settings.statistics},
        {"fast_products", &settings.fast_products},
        {"max_pinned_bytes", &settings.max_pinned_bytes},
        {"expert_cache_bytes", &settings.expert_cache_bytes}, {"expert_cpu_ns", &settings.expert_cpu_ns},
        {"expert_cpu_base_ns", &settings.expert_cpu_base_ns},
        {"expert_link_ns", &settings.expert_link_ns}, {"expert_link_latency_ns", &settings.expert_link_latency_ns},
        {"expert_prediction", &settings.expert_prediction},
    };
    for (const auto & option : options) {
        if (name != nullptr && strcmp(option.name, name) == 0) {
            return option.value;
        }
    }
    return nullptr;
}

static bool is_host_class(int32_t value) {
    return value == ATS_STREAM || value == ATS_CPU;
}

int ats_set_classes(const char * const * names, const int32_t * decode, const int32_t * prefill, int32_t n) {
    if (n < 0 || (n > 0 && (names == nullptr || decode == nullptr || prefill == nullptr))) {
        return ats_fail("ats_set_classes: missing arrays");
    }
    std::unordered_map<std::string, WeightClasses> classes;
    for (int32_t i = 0; i < n; i++) {
        if (names[i] == nullptr || !is_host_class(decode[i]) || !is_host_class(prefill[i])) {
            return ats_fail("ats_set_classes: entry %d is not a host class", i);
        }
        classes[names[i]] = {static_cast<ats_class>(decode[i]), static_cast<ats_class>(prefill[i])};
    }
    std::lock_guard<std::mutex> lock(settings_mutex);
    Settings                    changed = *settings_in_force;
    changed.classes                     = std::move(classes);
    replace_settings(std::move(changed));
    return 0;
}

int ats_set_option(const char * name, int64_t value) {
    std::lock_guard<std::mutex> lock(settings_mutex);
    Settings                    changed = *settings_in_force;
    int64_t *                   option  = find_option(changed, name);
    if (option == nullptr || value < 0) {
        return ats_fail("option '%s' = %lld is not valid", name == nullptr ? "" : name, static_cast<long long>(value));
    }
    *option = value;
    replace_settings(std::move(changed));
    return 0;
}

int ats_get_option(const char * name, int64_t * value) {
    Settings  copy   = *current_settings();
    int64_t * option = find_option(copy, name);
    if (option == nullptr || value == nullptr) {
        return ats_fail("unknown option '%s'", name == nullptr ? "" : name);
    }
    *value = *option;
    return 0;
}

static bool parse_host_class(const std::string & text, ats_class & result) {
    result = text == "stream" ? ATS_STREAM : ATS_CPU;
    return text == "stream" || text == "cpu";
}

int load_settings_file(const char * path) {
    std::ifstream file(path);
    if (!file) {
        return ats_fail("cannot read %s", path);
    }
    Settings    loaded;
    std::string line;
    for (int number = 1; std::getline(file, line); number++) {
        std::istringstream words(line);
        std::string        kind, name, first, second;
        if (!(words >> kind)) {
            continue;
        }
        bool ok = static_cast<bool>(words >> name >> first);
        if (ok && kind == "option") {
            int64_t * option = find_option(loaded, name.c_str());
            char *    end    = nullptr;
            ok               = option != nullptr;
            if (ok) {
                *option = strtoll(first.c_str(), &end, 10);
                ok      = *end == '\0' && *option >= 0;
            }
        } else if (ok && kind == "weight") {
            WeightClasses & classes = loaded.classes[name];
            ok = (words >> second) && parse_host_class(first, classes.decode) && parse_host_class(second, classes.prefill);
        } else {
            ok = false;
        }
        if (!ok) {
            return ats_fail("%s:%d: expected 'option NAME VALUE' or 'weight NAME DECODE PREFILL'", path, number);
        }
    }
    std::lock_guard<std::mutex> lock(settings_mutex);
    replace_settings(std::move(loaded));
    return 0;
}
