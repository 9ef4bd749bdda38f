// zeroplan machines [NAME|FILE]

#include <sstream>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/machines_command.h"

namespace zeroplan {

Outcome run_machines(const Arguments& arguments) {
  CommandLine line("machines", "The catalog of machines and GPUs, or one of them: every value with its source.",
                   "Example:\n  zeroplan machines p4de.24xlarge\n  zeroplan machines H100 --json");
  std::string name;
  bool json = false;
  line.positional("NAME", "A node, a GPU or a machine.json; without it: the list", name);
  line.toggle("--json", "JSON, the form of machine.json", json);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  std::ostringstream out;
  if (name.empty()) {
    print_machines(out, json);
  } else {
    print_machine_or_gpu(name, out, json);
  }
  return {out.str(), {}, kDone};
}

}  // namespace zeroplan
