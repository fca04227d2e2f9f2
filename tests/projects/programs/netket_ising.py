"""NetKet: the ground state of a transverse-field Ising chain, sampled by all processes together.

As its documentation has it for several processes: `jax.distributed.initialize()`, and nothing else.
"""

import json
import sys

import jax

if "alone" not in sys.argv:
    jax.distributed.initialize()

import netket as nk  # NetKet wants the processes to be there

hilbert = nk.hilbert.Spin(0.5, 12)
hamiltonian = nk.operator.IsingJax(hilbert, graph=nk.graph.Chain(12), h=1.0)
sampler = nk.sampler.MetropolisLocal(hilbert, n_chains=16)
state = nk.vqs.MCState(sampler, nk.models.RBM(alpha=1), n_samples=512, seed=1, sampler_seed=2)
driver = nk.driver.VMC_SR(hamiltonian, nk.optimizer.Sgd(0.05), variational_state=state, diag_shift=0.01)
log = nk.logging.RuntimeLog()
driver.run(30, out=log, show_progress=False)
if jax.process_index() == 0:
    energies = log.data["Energy"]["Mean"].real.tolist()
    print(json.dumps({"devices": len(jax.devices()), "energies": energies}), flush=True)
