#pragma once
// `zeroplan whatif FILE`: workloads, machines with prices of their own, a budget and a deadline. JSON, schema 1, strict
// (docs/whatif.md).

#include <map>
#include <string>
#include <vector>

#include "cli/workload.h"
#include "planner/whatif.h"

namespace zeroplan {

/// The flags of a workload, those of plan and whatif's own.
struct WhatifFlags {
  WorkloadFlags workload;
  std::string budget, deadline;

  /// What stands behind "--seq-len"; nullptr when whatif has no such flag in its file.
  std::string* find(std::string_view flag);
  /// Of the whole run. Throws InputError.
  WhatifLimits limits() const;
};

struct WhatifFile {
  struct Value {
    std::string text;   // as behind the flag
    std::string place;  // "buy.json:7: /workloads/0/seq_len"
  };
  struct Workload {
    std::string name;
    std::map<std::string, Value, std::less<>> values;  // by flag: "--seq-len"
  };
  std::vector<Workload> workloads;    // empty: the command line says it; else those of the file
  Workload shared;                    // budget, deadline and objective of every workload that has none of its own
  std::vector<Alternative> machines;  // empty: --hardware says them
  std::string machines_place;         // "buy.json:12: /machines"
};

/// Paths in the file are relative to its folder. Throws InputError with line and key.
WhatifFile read_whatif_file(const std::string& path);

/// One workload: the flags that were given, and what the file says of the others. A note for each value of the file
/// that a flag replaces.
WhatifFlags merged(const WhatifFlags& given, const WhatifFile& file, const WhatifFile::Workload& workload,
                   std::vector<std::string>& notes);

/// The message with the place in the file instead of the flag at its front, when that flag's value came from there.
std::string placed(const std::string& message, const WhatifFlags& given, const WhatifFile& file,
                   const WhatifFile::Workload& workload);

}  // namespace zeroplan
