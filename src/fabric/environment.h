// This process's place among the ranks, as its launcher's environment variables describe it.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace switchyard {

// getenv, or a stand-in for it; it returns null if the variable is not set.
using EnvironmentLookup = std::function<const char*(const char*)>;

struct LaunchedRank {
  int rank = 0;
  int size = 1;
  // The names of the variables that rank and size come from.
  const char* rank_variable = "";
  const char* size_variable = "";
  // tcp://host:port, where the ranks are spread over several hosts.
  std::optional<std::string> rendezvous;
};

// Returns rank and size from the first of these pairs that is set:
//   RANK / WORLD_SIZE                          torchrun, `switchyard launch`
//   OMPI_COMM_WORLD_RANK / _SIZE               Open MPI
//   PMI_RANK / PMI_SIZE                        MPICH, Intel MPI
//   SLURM_PROCID / SLURM_NTASKS                srun; SLURM_NTASKS alone, as in an salloc
//                                              shell, does not count
// Returns nothing if none is set. Throws Error{kInvalidArgument} naming the variable and its value
// if only one of a pair is set, if a value is not a decimal number, or if a rank is not below its
// size.
//
// Ranks are spread over several hosts if LOCAL_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_SIZE or
// MPI_LOCALNRANKS is below the size, or SLURM_STEP_NUM_NODES above 1. They meet at
// SWITCHYARD_RENDEZVOUS if that is a tcp://, else on the host of rank 0: MASTER_ADDR, or the first
// of SLURM_STEP_NODELIST. The port is then a hash of launched_job(), from 20000 to 29999;
// torchrun's own store has MASTER_PORT. Throws Error{kInvalidArgument} if no host is known.
std::optional<LaunchedRank> parse_launched_rank(const EnvironmentLookup& lookup);

// Returns a string that all ranks of this job share. It is SWITCHYARD_RENDEZVOUS if that is set.
// Otherwise it consists of every variable that is set among TORCHELASTIC_RUN_ID,
// TORCHELASTIC_RESTART_COUNT, MASTER_PORT, OMPI_MCA_ess_base_jobid, PMIX_NAMESPACE, PMI_JOBID,
// SLURM_JOB_ID and SLURM_STEP_ID. If none is, it is the id of the parent process, which is the
// launcher. The string is only a name: torchrun's own store listens on MASTER_PORT.
std::string job_identity(const EnvironmentLookup& lookup);

// Returns a string that tells this process's job from others, as far as the launcher says:
// SWITCHYARD_RENDEZVOUS or the variables above. It is empty if none is set, since ranks that are
// started by hand need not have the same parent.
std::string launched_job(const EnvironmentLookup& lookup);

// Returns job_identity() of this process's environment, with the number of rendezvous strings that
// this process took before. So ranks meet if they make their worlds in the same order.
std::string next_rendezvous();

}  // namespace switchyard
