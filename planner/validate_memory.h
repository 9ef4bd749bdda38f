#pragma once
// Published runs (rows of data/published) against the memory of the card they ran on: does the engine's prediction fit
// where the run did? And beside the peak that some rows print. Part of `zeroplan validate`; rules: docs/accuracy.md.

#include <string>
#include <string_view>
#include <vector>

#include "planner/validate.h"

namespace zeroplan {

struct PublishedMemory {
  std::vector<Verdict> verdicts;
  std::vector<Comparison> comparisons;
  std::vector<SkippedStep> skipped;  // rows without a verdict, and why
};

/// All rows of a table with the common columns of data/published; nothing for a table of another kind. `margin`: share
/// of the card that stays free. Throws InputError when a record is cut.
PublishedMemory read_published_memory(std::string_view text, const std::string& name, double margin);

}  // namespace zeroplan
