#pragma once
// The commands: each takes the arguments after its name and returns what to print. They throw InputError and friends;
// main() maps those to exit codes.

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace zeroplan {

inline constexpr int kDone = 0;
inline constexpr int kNothingFits = 1;
inline constexpr int kRegression = 1;  // validate --against
inline constexpr int kBadInput = 2;
inline constexpr int kDeviceFailed = 3;
inline constexpr int kBug = 70;

/// What a command has to say.
struct Outcome {
  std::string out;                 // stdout, whole
  std::vector<std::string> notes;  // stderr, one line each
  int exit_code = kDone;
};

using Arguments = std::vector<std::string>;

Outcome run_plan(const Arguments& arguments);
Outcome run_simulate(const Arguments& arguments);
Outcome run_run(const Arguments& arguments);
Outcome run_compare(const Arguments& arguments);
Outcome run_check(const Arguments& arguments);
Outcome run_probe(const Arguments& arguments);
Outcome run_validate(const Arguments& arguments);
Outcome run_whatif(const Arguments& arguments);
Outcome run_models(const Arguments& arguments);
Outcome run_machines(const Arguments& arguments);
Outcome run_topology(const Arguments& arguments);

struct Command {
  std::string_view name;
  std::string_view summary;
  Outcome (*run)(const Arguments&);
};
/// Those that are built, in the order of --help.
std::span<const Command> commands();

/// The whole command line after the program's name: finds the command ("plan" when the first argument is a flag) and
/// runs it. Throws what the command throws.
Outcome run_command_line(const Arguments& arguments);

}  // namespace zeroplan
