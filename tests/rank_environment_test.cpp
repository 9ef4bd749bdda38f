// What launchers put into the environment, and what is refused.

#include "runtime/rank_environment.h"

#include <map>

#include "models/error.h"
#include "tests/catch.h"

using namespace zeroplan;
using namespace zeroplan::tests;

namespace {

using Variables = std::map<std::string, std::string, std::less<>>;

RankEnvironment read(const Variables& variables) {
  return read_rank_environment([&](std::string_view name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

const Variables kTorchrun{
    {"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "10.0.0.7"}, {"MASTER_PORT", "12345"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kPmi{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kSlurm{{"SLURM_PROCID", "3"},
                       {"SLURM_NTASKS", "4"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_NODELIST", "node[03-05,9],login1"}};

/// `variables` with one of them set to another value ("-" takes it away).
Variables with(Variables variables, const std::string& name, const std::string& value) {
  if (value == "-") {
    variables.erase(name);
  } else {
    variables[name] = value;
  }
  return variables;
}

}  // namespace

TEST_CASE("each launcher's variables name the rank") {
  const RankEnvironment torchrun = read(kTorchrun);
  CHECK(torchrun.source == RankSource::torchrun);
  CHECK(torchrun.rank == 5);
  CHECK(torchrun.size == 8);
  CHECK(torchrun.local_rank == 1);
  CHECK(torchrun.master_address == "10.0.0.7");
  CHECK(torchrun.master_port == 12345);

  const RankEnvironment open_mpi = read(kOpenMpi);
  CHECK(open_mpi.source == RankSource::open_mpi);
  CHECK(open_mpi.rank == 1);
  CHECK(open_mpi.size == 2);
  CHECK(open_mpi.local_rank == 1);
  CHECK(open_mpi.master_address == "127.0.0.1");
  CHECK(open_mpi.master_port == kDefaultMasterPort);

  const RankEnvironment pmi = read(kPmi);
  CHECK(pmi.source == RankSource::pmi);
  CHECK(pmi.size == 2);

  const RankEnvironment slurm = read(kSlurm);
  CHECK(slurm.source == RankSource::slurm);
  CHECK(slurm.rank == 3);
  CHECK(slurm.size == 4);
  CHECK(slurm.local_rank == 1);
  CHECK(slurm.master_address == "node03");

  const RankEnvironment alone = read({{"PATH", "/bin"}, {"SLURM_NTASKS", "4"}});
  CHECK(alone.source == RankSource::one_process);
  CHECK(alone.rank == 0);
  CHECK(alone.size == 1);
}

TEST_CASE("the first launcher wins: torchrun inside an allocation is torchrun") {
  Variables all = kTorchrun;
  for (const Variables& more : {kOpenMpi, kPmi, kSlurm}) all.insert(more.begin(), more.end());
  CHECK(read(all).source == RankSource::torchrun);
  all.erase("RANK");
  all.erase("WORLD_SIZE");
  CHECK(read(all).source == RankSource::open_mpi);
  CHECK(read(all).master_address == "10.0.0.7");
  all.erase("OMPI_COMM_WORLD_RANK");
  CHECK(read(all).source == RankSource::pmi);
  all.erase("PMI_RANK");
  CHECK(read(all).source == RankSource::slurm);
  CHECK(read(all).master_port == 12345);
}

TEST_CASE("Slurm: a batch script is one process, a step has its own hosts") {
  // As slurmd 22.05 sets them (docs/communication.md).
  const RankEnvironment batch = read(with(kSlurm, "SLURM_STEP_ID", "-"));
  CHECK(batch.source == RankSource::one_process);
  CHECK(batch.size == 1);
  CHECK(read(with(with(kSlurm, "SLURM_STEP_ID", "-"), "SLURM_STEPID", "2")).rank == 3);
  CHECK(read(with(kSlurm, "SLURM_STEP_NODELIST", "node[04-05]")).master_address == "node04");
  CHECK(read(with(with(kSlurm, "SLURM_NODELIST", "-"), "SLURM_JOB_NODELIST", "node9")).master_address == "node9");
}

TEST_CASE("jobs of mpirun and srun meet at ports of their own, all ranks of a job at one") {
  const auto slurm = [](const std::string& rank, const std::string& job, const std::string& step) {
    return read(with(with(with(kSlurm, "SLURM_PROCID", rank), "SLURM_JOB_ID", job), "SLURM_STEP_ID", step));
  };
  CHECK(slurm("0", "7", "0").job == "7.0");
  CHECK(slurm("0", "7", "0").master_port == slurm("3", "7", "0").master_port);
  CHECK(slurm("0", "7", "0").master_port != slurm("0", "8", "0").master_port);
  CHECK(slurm("0", "7", "0").master_port != slurm("0", "7", "1").master_port);
  for (const char* job : {"1085407233", "prterun-vm-12345@1", "x"}) {
    const RankEnvironment open_mpi = read(with(kOpenMpi, "PMIX_NAMESPACE", job));
    CHECK(open_mpi.job == job);
    CHECK((open_mpi.master_port >= 20000 && open_mpi.master_port < kDefaultMasterPort));
    CHECK(read(with(with(kOpenMpi, "PMIX_NAMESPACE", job), "MASTER_PORT", "999")).master_port == 999);
  }
  // Each part of a heterogeneous job has another number.
  CHECK(read(with(with(kSlurm, "SLURM_JOB_ID", "7"), "SLURM_HET_SIZE", "2")).job.empty());
  CHECK(read(kSlurm).master_port == kDefaultMasterPort);
}

TEST_CASE("a variable without sense is an error that names it") {
  struct Case {
    Variables variables;
    std::string name, value;
  };
  const std::vector<Case> cases = {
      {kTorchrun, "RANK", "8"},
      {kTorchrun, "RANK", "-1"},
      {kTorchrun, "RANK", "two"},
      {kTorchrun, "RANK", ""},
      {kTorchrun, "RANK", "-"},
      {kTorchrun, "WORLD_SIZE", "0"},
      {kTorchrun, "WORLD_SIZE", "-"},
      {kTorchrun, "WORLD_SIZE", "99999999999999999999"},
      {kTorchrun, "LOCAL_RANK", "-"},
      {kTorchrun, "LOCAL_RANK", "8"},
      {kTorchrun, "MASTER_ADDR", "-"},
      {kTorchrun, "MASTER_ADDR", ""},
      {kTorchrun, "MASTER_PORT", "0"},
      {kTorchrun, "MASTER_PORT", "65536"},
      {kOpenMpi, "OMPI_COMM_WORLD_SIZE", "1"},
      {kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
      {kPmi, "PMI_SIZE", "-"},
      {kPmi, "MPI_LOCALRANKID", "x"},
      {kSlurm, "SLURM_LOCALID", "-"},
      {kSlurm, "SLURM_NODELIST", "node[3-"},
  };
  for (const Case& wrong : cases) {
    // A rank too large for its size names the rank.
    const std::string named = wrong.name == "OMPI_COMM_WORLD_SIZE" ? "OMPI_COMM_WORLD_RANK" : wrong.name;
    CAPTURE(wrong.name, wrong.value);
    CHECK_THROWS_AS(read(with(wrong.variables, wrong.name, wrong.value)), InputError);
    CHECK_THROWS_WITH(read(with(wrong.variables, wrong.name, wrong.value)), HasText(named));
  }
  // Two hosts: 127.0.0.1 would be another rank 0 on each.
  CHECK_THROWS_WITH(read(with(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "1")), HasText("MASTER_ADDR"));
  CHECK_THROWS_WITH(read(with(kPmi, "MPI_LOCALNRANKS", "-")), HasText("MASTER_ADDR"));
}

TEST_CASE("the first host of a Slurm list") {
  CHECK(first_host("node1", "x") == "node1");
  CHECK(first_host("a-1.example_x,b", "x") == "a-1.example_x");
  CHECK(first_host("node[03-05,9]", "x") == "node03");
  CHECK(first_host("node[9,03-05]", "x") == "node9");
  CHECK(first_host("rack[2-3]node[08-11],login", "x") == "rack2node08");
  CHECK(first_host("n[1-2]-ib", "x") == "n1-ib");
  CHECK(first_host("n[8-12]", "x") == "n8");
  for (const char* wrong : {"", ",a", "a,", "a,,b", "a[", "a[]", "a[1", "a]1", "a[x]", "a[1-]", "a[-1]", "a[3-2]",
                            "a[1,]", "a b", "a[1-2-3]"}) {
    CAPTURE(wrong);
    CHECK_THROWS_WITH(first_host(wrong, "SLURM_NODELIST"), HasText("SLURM_NODELIST"));
  }
}
