"""A request is done once, whoever sends it how often."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from steering_double import Live

from orchestrator.control import control_pb2 as pb
from orchestrator.control.idempotency import RequestMemory
from orchestrator.control.refusals import OtherRequest, TooMany
from orchestrator.errors import RunError
from orchestrator.steering import InvalidRequest


def test_the_same_request_gets_the_same_answer(run: Live) -> None:
    request = pb.ScaleRequest(request_id="a", role=pb.ROLE_ROLLOUT, target=3)
    answers = [run.stub.Scale(request, metadata=run.metadata) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert len(run.steering.calls) == 1


def test_a_failure_is_an_answer_too(run: Live) -> None:
    request = pb.ScaleRequest(request_id="a", role=pb.ROLE_ROLLOUT, target=99)
    told = set()
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as raised:
            run.stub.Scale(request, metadata=run.metadata)
        told.add((raised.value.code(), raised.value.details()))
    assert len(told) == 1
    assert len(run.steering.calls) == 1


@pytest.mark.parametrize("method", ["Scale", "Stop"])
def test_an_id_of_another_request_is_refused(run: Live, method: str) -> None:
    run.stub.Scale(
        pb.ScaleRequest(request_id="a", role=pb.ROLE_ROLLOUT, target=3), metadata=run.metadata
    )
    other: Any = (
        pb.ScaleRequest(request_id="a", role=pb.ROLE_ROLLOUT, target=4)
        if method == "Scale"
        else pb.StopRequest(request_id="a")
    )
    with pytest.raises(grpc.RpcError) as raised:
        getattr(run.stub, method)(other, metadata=run.metadata)
    assert raised.value.code() is StatusCode.ALREADY_EXISTS
    assert len(run.steering.calls) == 1


def test_senders_at_the_same_time_share_the_work(run: Live) -> None:
    run.close_gate()
    request = pb.CheckpointRequest(request_id="a")
    with ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(run.stub.Checkpoint, request, metadata=run.metadata, timeout=60)
            for _ in range(8)
        ]
        run.stub.GetStatus(pb.GetStatusRequest(), metadata=run.metadata)
        run.open_gate()
        answers = [call.result(60) for call in calls]
    assert all(answer == answers[0] for answer in answers)
    assert run.steering.calls == [("checkpoint",)]


def test_work_goes_on_when_its_caller_leaves_or_runs_out_of_time(run: Live) -> None:
    run.close_gate()
    request = pb.CheckpointRequest(request_id="a")
    with pytest.raises(grpc.RpcError) as raised:
        run.stub.Checkpoint(request, metadata=run.metadata, timeout=0.2)
    assert raised.value.code() is StatusCode.DEADLINE_EXCEEDED
    with grpc.insecure_channel(run.endpoint.address) as leaving:
        path = "/slipstream.v1.ControlService/Checkpoint"
        call = leaving.unary_unary(path).future(
            request.SerializeToString(), metadata=run.metadata, timeout=60
        )
        call.cancel()
    run.open_gate()
    answer = run.stub.Checkpoint(request, metadata=run.metadata, timeout=60)
    assert answer.step == 12
    assert run.steering.calls == [("checkpoint",)]
    assert run.steering.finished == 1


def test_memory_is_bounded_and_forgets_the_oldest_that_is_done() -> None:
    done: list[str] = []

    async def main() -> None:
        memory = RequestMemory(remembered=3, unfinished=2)
        gate = asyncio.Event()

        async def held() -> str:
            await gate.wait()
            return "held"

        def quick(name: str) -> Any:
            async def work() -> str:
                done.append(name)
                return name

            return work

        waiting = asyncio.ensure_future(memory.once("held", b"held", held))
        await asyncio.sleep(0)
        for name in "abcde":
            assert await memory.once(name, name.encode(), quick(name)) == name
        assert await memory.once("e", b"e", quick("e")) == "e"
        assert await memory.once("a", b"a", quick("a")) == "a"
        assert done == [*"abcde", "a"]
        again = asyncio.ensure_future(memory.once("held", b"held", held))
        second = asyncio.ensure_future(memory.once("second", b"second", held))
        await asyncio.sleep(0)
        with pytest.raises(TooMany, match="2 requests are unfinished"):
            await memory.once("third", b"third", held)
        with pytest.raises(OtherRequest):
            await memory.once("held", b"else", held)
        with pytest.raises(InvalidRequest):
            await memory.once("", b"", held)
        gate.set()
        assert await asyncio.gather(waiting, again, second) == ["held"] * 3

    asyncio.run(main())


def test_closing_gives_up_what_is_unfinished() -> None:
    async def main() -> None:
        memory = RequestMemory()
        waiting = asyncio.ensure_future(memory.once("a", b"", asyncio.Event().wait))
        await asyncio.sleep(0)
        await memory.close()
        with pytest.raises(RunError, match="the run ended before"):
            await waiting

    asyncio.run(main())
