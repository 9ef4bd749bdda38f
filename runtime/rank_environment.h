#pragma once
// Which rank of which job this process is, as its launcher said it: torchrun, mpirun (Open MPI, or MPICH and Intel MPI
// through PMI), or srun. The caller hands the environment in; this library never reads it.

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace zeroplan {

enum class RankSource { torchrun, open_mpi, pmi, slurm, one_process };

/// "torchrun", "Open MPI", "PMI", "Slurm", "one process".
std::string_view to_string(RankSource source);

/// torchrun's default port; its agent may listen there, so a store of ours listens elsewhere (process_communicator.h).
inline constexpr int kDefaultMasterPort = 29500;

struct RankEnvironment {
  int rank = 0;
  int size = 1;
  int local_rank = 0;                        // on this host
  std::string master_address = "127.0.0.1";  // the host of rank 0
  int master_port = kDefaultMasterPort;
  RankSource source = RankSource::one_process;
  std::string job;  // what mpirun (PMIX_NAMESPACE) or srun (job.step) calls it: equal on its ranks; else empty
};

/// The value of a variable, nullopt when it is not set: in the command line, a wrapper of std::getenv.
using EnvironmentLookup = std::function<std::optional<std::string>(std::string_view)>;

/// The first launcher whose rank variable is set: RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, SLURM_PROCID (in a step of
/// srun: a batch script is one process); then its other variables must be there. MASTER_ADDR and MASTER_PORT are
/// torchrun's and, where set, go for the others as well; without them Slurm's master is the first host of
/// SLURM_STEP_NODELIST (or SLURM_NODELIST, SLURM_JOB_NODELIST), and mpirun's is this host when all ranks are on it; the
/// port then follows from the job's name, where it has one. Throws InputError that names the variable for a value that
/// is missing or no sense.
RankEnvironment read_rank_environment(const EnvironmentLookup& lookup);

/// The first host of a list in Slurm's form: "node03" for "node[03-05,9],login1". Throws InputError that begins with
/// `what` for another form.
std::string first_host(std::string_view list, std::string_view what);

}  // namespace zeroplan
