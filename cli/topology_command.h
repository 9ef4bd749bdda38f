#pragma once
// What `zeroplan topology` prints. Argument parsing is elsewhere.

#include <ostream>
#include <string>
#include <string_view>

namespace zeroplan {

/// The wiring that `text` (`nvidia-smi topo -m` or NCCL's topology XML, called `file` in errors) describes: the matrix
/// as read, the tree of sockets, root complexes and switches, the route and rate of each GPU pair, what limits host
/// copies, each GPU's NIC, the machine's form. `gpu` is the text of --gpu, empty when it was not given. Throws
/// InputError.
void print_topology(std::string_view text, const std::string& file, const std::string& gpu, std::ostream& out,
                    bool json);

}  // namespace zeroplan
