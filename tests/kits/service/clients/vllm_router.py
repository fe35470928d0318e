"""Run by the environment that has smg-grpc-proto: what a router asks of an engine, by its own stubs.

python vllm_router.py GRPC_ADDRESS TOKEN_IDS_AS_JSON
"""

from __future__ import annotations

import json
import sys

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

if __name__ == "__main__":
    _, address, tokens = sys.argv
    with grpc.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=30).healthy
        info = stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.is_generation, info.served_model_name) == (True, "toy")
        assert stub.GetServerInfo(pb.GetServerInfoRequest()).max_num_seqs == 4
        sampling = pb.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
        request = pb.GenerateRequest(
            request_id="r",
            tokenized=pb.TokenizedInput(input_ids=json.loads(tokens)),
            sampling_params=sampling,
            stream=True,
        )
        responses = list(stub.Generate(request))
        chunks = [one.chunk for one in responses if one.HasField("chunk")]
        complete = responses[-1].complete
        found = [token for chunk in chunks for token in chunk.token_ids]
        assert found == list(complete.output_ids)
        assert (complete.finish_reason, len(complete.output_logprobs.token_logprobs)) == ("length", 8)
        stub.Abort(pb.AbortRequest(request_ids=["r"]))
        print(json.dumps(found))
