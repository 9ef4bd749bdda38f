#pragma once
// Small models for the tests of data, checkpoints and weight files.

#include <string>

#include "models/model_spec.h"

namespace zeroplan::tests {

/// Two layers, tied; hidden 32, vocabulary 96.
inline ModelSpec tiny_gpt2() {
  return read_model(
      R"({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4,
          "n_positions": 24, "vocab_size": 96})",
      "gpt2.json");
}

/// Two layers, grouped queries, not tied; hidden 48, vocabulary 80. No size is a multiple of 256 bytes.
inline ModelSpec tiny_llama(const std::string& more = "") {
  return read_model(
      R"({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "intermediate_size": 72,
          "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 80,
          "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu")" +
          more + "}",
      "llama.json");
}

}  // namespace zeroplan::tests
