// What the launcher of this process says about its place among the ranks.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace switchyard {

// getenv, or a stand-in for it: null where the variable is not set.
using EnvironmentLookup = std::function<const char*(const char*)>;

struct LaunchedRank {
  int rank = 0;
  int size = 1;
  // The variables that tell them.
  const char* rank_variable = "";
  const char* size_variable = "";
};

// Rank and size from the first of these that is set:
//   RANK / WORLD_SIZE                          torchrun, `switchyard launch`
//   OMPI_COMM_WORLD_RANK / _SIZE               Open MPI
//   PMI_RANK / PMI_SIZE                        MPICH, Intel MPI
//   SLURM_PROCID / SLURM_NTASKS                srun; SLURM_NTASKS alone, as in an salloc
//                                              shell, does not count
// Nothing where none is set. Throws Error{kInvalidArgument} naming the variable and its value if
// only one of a pair is set, a value is not a decimal number, or a rank is not below its size;
// Error{kUnsupported} if LOCAL_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_SIZE, MPI_LOCALNRANKS or
// SLURM_STEP_NUM_NODES tells that the ranks are spread over several hosts.
std::optional<LaunchedRank> parse_launched_rank(const EnvironmentLookup& lookup);

// A string that all ranks of this job share: SWITCHYARD_RENDEZVOUS if set; otherwise every
// variable that identifies the job and is set, of TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT,
// MASTER_PORT, OMPI_MCA_ess_base_jobid, PMIX_NAMESPACE, PMI_JOBID, SLURM_JOB_ID and
// SLURM_STEP_ID; otherwise the id of the parent process, which is the launcher. Only ever used as
// a name: torchrun's own store listens on MASTER_PORT.
std::string job_identity(const EnvironmentLookup& lookup);

// What tells the job of this process from others, as far as its launcher says:
// SWITCHYARD_RENDEZVOUS or the variables above. Empty where nothing is set, since ranks that are
// started by hand need not have the same parent.
std::string launched_job(const EnvironmentLookup& lookup);

// job_identity of this process's environment, and how many rendezvous strings this process took
// before. The ranks meet if they make their worlds in the same order.
std::string next_rendezvous();

}  // namespace switchyard
