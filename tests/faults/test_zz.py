import os, time, numpy as np
import pytest
def go(comm): return comm.allreduce(np.ones(3)).tolist()
def test_a(nursery):
    t=time.time()
    for i in range(10): r=nursery.run(3, go)
    print(r, (time.time()-t)/10)
