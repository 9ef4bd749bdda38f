#pragma once
// The flags that plan and whatif share: what is trained, on what.

#include <optional>
#include <string>
#include <string_view>

#include "cli/command_line.h"
#include "planner/search.h"

namespace zeroplan {

/// What is trained and which choices are fixed; the machine is apart.
struct WorkloadFlags {
  std::string model, seq_len, global_batch, precision, trainable;
  std::string zero, offload, recompute, micro_batch, engine, adam, alloc_conf;
  std::string objective, margin, tokens;

  void add_to(CommandLine& line);
  /// The request without its machine. Throws InputError.
  Request request() const;
  /// `--tokens`; nothing when it was not given.
  std::optional<double> num_tokens() const;

 private:
  void set_software(Request& request) const;
};

/// Which machine.
struct MachineFlags {
  std::string gpus, nodes, machine, host_memory, nvme;

  void add_to(CommandLine& line);
  /// Throws InputError.
  MachineSpec resolve() const;
};

}  // namespace zeroplan
