// Counts which experts real text is routed to, while llama.cpp evaluates it.
#include "atsplan.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <string.h>
#include <string>
#include <vector>

struct ats_routing {
    struct Layer {
        std::string          weight; // the first tensor of experts in the layer
        std::vector<int64_t> counts; // per expert
    };

    std::vector<Layer>  layers;
    std::vector<char>   ids;
    const ggml_tensor * last_ids = nullptr;

    Layer * find(const char * weight) {
        for (Layer & layer : layers) {
            if (layer.weight == weight) {
                return &layer;
            }
        }
        return nullptr;
    }
};

ats_routing * ats_routing_create(void) {
    return new ats_routing();
}

void ats_routing_free(ats_routing * routing) {
    delete routing;
}

// All products of a layer's experts share one tensor of expert numbers: the first one counts them.
static bool wants(ats_routing & routing, const ggml_tensor * node) {
    if (node->op != GGML_OP_MUL_MAT_ID) {
        return false;
    }
    if (routing.find(node->src[0]->name) == nullptr) {
        if (node->src[2] == routing.last_ids) {
            return false;
        }
        routing.layers.push_back({node->src[0]->name, std::vector<int64_t>(static_cast<size_t>(node->src[0]->ne[2]))});
    }
    routing.last_ids = node->src[2];
    return true;
}

bool ats_routing_eval(ggml_tensor * node, bool ask, void * user) {
    ats_routing & routing = *static_cast<ats_routing *>(user);
    if (ask) {
        return wants(routing, node);
    }
    const ggml_tensor * ids = node->src[2];
    routing.ids.resize(ggml_nbytes(ids));
    ggml_backend_tensor_get(ids, routing.ids.data(), 0, routing.ids.size());
    std::vector<int64_t> & counts = routing.find(node->src[0]->name)->counts;
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t j = 0; j < ids->ne[0]; j++) {
            int32_t expert;
            memcpy(&expert, routing.ids.data() + static_cast<size_t>(token) * ids->nb[1] + static_cast<size_t>(j) * ids->nb[0], sizeof expert);
            if (expert >= 0 && static_cast<size_t>(expert) < counts.size()) {
                counts[static_cast<size_t>(expert)]++;
            }
        }
    }
    return true;
}

void ats_routing_read(const ats_routing * routing, ats_routing_callback callback, void * user) {
    for (const ats_routing::Layer & layer : routing->layers) {
        callback(user, layer.weight.c_str(), layer.counts.data(), static_cast<int32_t>(layer.counts.size()));
    }
}
