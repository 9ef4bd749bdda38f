// zeroplan models [NAME|config.json]

#include <sstream>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/models_command.h"

namespace zeroplan {

Outcome run_models(const Arguments& arguments) {
  CommandLine line("models",
                   "The catalog of models, or one model: tensors, FLOPs and activation bytes a token, sources.",
                   "Example:\n  zeroplan models 70B\n  zeroplan models my-model/config.json --json");
  std::string name;
  bool json = false;
  line.positional("MODEL", "A catalog name, a size (70B), a config.json or its directory; without it: the list", name);
  line.toggle("--json", "JSON: name, family, parameters, active_parameters, tensors, ...", json);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  std::ostringstream out;
  if (name.empty()) {
    print_models(out, json);
  } else {
    print_model(find_model(name), out, json);
  }
  return {out.str(), {}, kDone};
}

}  // namespace zeroplan
