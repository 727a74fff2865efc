import time,random,sys
import numpy as np
from penstock.streams import *
from penstock.shared.streams.stream_task import StreamTask
from penstock.shared.common.records import Columns
from penstock.shared.common.serialization import bytes_deserializer
import inspect
random.seed(1)
N=400_000
def data(n,keys=20000,spread=30):
    ks=[b"user-%d"%int(keys*random.random()**2.2) for _ in range(n)]
    t=0;ts=[]
    for i in range(n):
        t+=random.randint(0,6); ts.append(1_700_000_000_000+t-random.randint(0,20000))
    vs=[b'{"ms":%d,"page":"p%d"}'%(random.randint(0,999),i%7) for i in range(n)]
    return ks,ts,vs
ks,ts,vs=data(N)
print(inspect.signature(Columns))
def cols(a,b):
    return Columns("clicks",0,ks[a:b],vs[a:b],np.array(ts[a:b]),np.arange(a,b))
def run(name,make):
    b=StreamsBuilder(); make(b)
    t=StreamTask(b.build().of_application("app"),0,application="app"); t.initialize(0)
    from penstock.shared.streams.at_work import at_work
    parts=[cols(a,a+20000) for a in range(0,N,20000)]
    t0=time.perf_counter();c0=time.process_time(); commit=0
    for p in parts:
        t.process(p,0)
        s=time.perf_counter(); t.prepare_commit(0); t.commit_succeeded(); commit+=time.perf_counter()-s
    d=time.perf_counter()-t0
    print(f"{name:28} {N/d:12,.0f}/s  {1e6*d/N:.2f} us, commit {1e6*commit/N:.2f}",flush=True)
import datetime
from penstock.clients import *
def s(b): return b.stream("clicks",value=bytes).group_by_key()
def j(b): return b.stream("clicks",value=dict).group_by_key()
which=sys.argv[1:]
for name,m in {
 "session count":lambda b:s(b).session_window(30000,5000).aggregate("s",n=Count()).on_close().to("o"),
 "session count update":lambda b:s(b).session_window(30000,5000).aggregate("s",n=Count()).on_update().to("o"),
 "session mean json":lambda b:j(b).session_window(30000,5000).aggregate("s",n=Count(),m=Mean("ms")).on_close().to("o"),
 "session collect":lambda b:j(b).session_window(30000,5000).aggregate("s",n=CollectSet("page"),l=Last("page")).on_close().to("o"),
 "tumbling":lambda b:s(b).tumbling_window(60000,5000).aggregate("s",n=Count()).on_close().to("o"),
 "hopping12":lambda b:s(b).hopping_window(60000,5000,5000).aggregate("s",n=Count()).on_close().to("o"),
 "sliding":lambda b:s(b).sliding_window(60000,5000).aggregate("s",n=Count()).on_close().to("o"),
}.items():
    if not which or any(w in name for w in which):
        try: run(name,m)
        except Exception as e: print(name,repr(e)[:300])
