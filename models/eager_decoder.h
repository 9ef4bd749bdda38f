#pragma once
// Decoder-only models built like Llama: one set of blocks, families as rows of a table (eager_decoder_table.cpp).

#include <optional>

#include "models/eager_causal.h"

namespace zeroplan::eager {

/// What a family's classes are called and how its blocks differ from Llama's.
struct DecoderStyle {
  std::string_view family = "llama";
  std::string_view classes = "Llama";  // LlamaDecoderLayer, LlamaAttention, ...
  NormStyle norm = NormStyle::rms;
  bool positions_first = false;  // position_ids stand before position_embeddings in the call of a block
};

/// Throws InputError for a family without a row.
const DecoderStyle* find_decoder_style(std::string_view family);

std::unique_ptr<EagerModel> make_decoder(Context& context, const DecoderStyle& style);

}  // namespace zeroplan::eager
