// zeroplan topology FILE

#include <sstream>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/topology_command.h"
#include "models/error.h"
#include "models/text_file.h"

namespace zeroplan {

Outcome run_topology(const Arguments& arguments) {
  CommandLine line(
      "topology", "The wiring that `nvidia-smi topo -m` or NCCL's topology XML describes: graph, routes, shared links.",
      "Example:\n  nvidia-smi topo -m > topo.txt\n  zeroplan topology topo.txt --gpu A100-80G\n"
      "  nvidia-smi topo -m | zeroplan topology /dev/stdin");
  std::string path, gpu;
  bool json = false;
  line.positional("FILE", "Text of `nvidia-smi topo -m`, or the XML that NCCL_TOPO_DUMP_FILE writes; required", path);
  line.value("--gpu", "NAME", "GPU of the catalog: its link rates, and a machine.json under --json", gpu);
  line.toggle("--json", "JSON with stable keys on stdout", json);
  if (!line.parse(arguments)) return {line.help(), {}, kDone};
  if (path.empty()) throw InputError("zeroplan topology: expected FILE, got nothing; see --help");
  std::ostringstream out;
  print_topology(read_text_file(path), path, gpu, out, json);
  return {out.str(), {}, kDone};
}

}  // namespace zeroplan
