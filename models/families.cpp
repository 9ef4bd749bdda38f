#include "models/families.h"

#include <algorithm>
#include <iterator>

#include "models/family_rows.h"

// Facts: Hugging Face configuration and modelling files of each family, as collected with sources in
// models/catalog/models ("_source") and checked by tests/model_counts_test.cpp against published totals.

namespace zeroplan {
namespace {

std::vector<Family> make_families() {
  std::vector<Family> rows;
  for (const auto group : {llama_families, expert_families, gpt2_families, encoder_families}) {
    std::ranges::move(group(), std::back_inserter(rows));
  }
  std::ranges::sort(rows, {}, &Family::model_type);
  return rows;
}

}  // namespace

std::span<const Family> families() {
  static const std::vector<Family> rows = make_families();
  return rows;
}

const Family* find_family(std::string_view model_type) {
  const auto rows = families();
  const auto found = std::ranges::lower_bound(rows, model_type, {}, &Family::model_type);
  return found != rows.end() && found->model_type == model_type ? &*found : nullptr;
}

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const Family& family : families()) names.emplace_back(family.model_type);
  return names;
}

}  // namespace zeroplan
