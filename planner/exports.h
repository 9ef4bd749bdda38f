#pragma once
// What `plan --out` writes for other programs: the plan itself, DeepSpeed's and accelerate's configuration, a launcher.

#include <string>
#include <vector>

#include "planner/search.h"

namespace zeroplan {

struct ExportFile {
  std::string name;  // "deepspeed.json"
  std::string text;
  bool executable = false;
};

/// plan.json, deepspeed.json (DeepSpeed 0.19), accelerate_fsdp.yaml (only when FSDP2 can follow the plan) and launch.sh
/// (bash), in this order. `answer` is the search that `candidate` came from: its model, machine and margin are used.
/// The plan was made for our own engine; where DeepSpeed or FSDP2 cannot do the same, the file takes the choice that
/// needs less memory, and export_notes() says so. Precondition: check_plan() passed.
std::vector<ExportFile> export_files(const Candidate& candidate, const Answer& answer);

/// All that is written for a candidate, deepspeed.json such that it fits under DeepSpeed where anything does.
struct ExportSet {
  std::vector<ExportFile> files;   // as export_files()
  std::vector<std::string> notes;  // as export_notes()
  std::string under_deepspeed;     // as under_deepspeed()
};
ExportSet export_fitted(const Candidate& candidate, const Answer& answer);

/// What the candidate would take under DeepSpeed, in one line: "29.3 GiB allocated, ...; fits". Empty when it cannot be
/// predicted (a family without an eager graph, NVMe, ...).
std::string under_deepspeed(const Candidate& candidate, const Answer& answer);

/// One sentence for each choice that an exported file does not express as the plan has it, DeepSpeed's first.
/// launch.sh carries the same sentences as comments.
std::vector<std::string> export_notes(const Candidate& candidate, const Answer& answer);

}  // namespace zeroplan
