"""The answer, on reports made by hand."""

from mobius_ds.reporting.comparison.answer import answer
from tests.reporting.reports import arm, small


def test_the_faster_arm_is_named_with_both_times_and_the_bytes():
    said = answer(small())
    assert said["headline"] == "mobius is 4.00 times as fast as zero3 here: 0.500 s a step against 2.000 s."
    assert said["because"][0] == ("Bytes over the GPUs' host links, as counted without peer-to-peer: mobius 150.0 MB a step "
                                  "(1.50 times the model size), zero3 1,200.0 MB a step (12.00 times the model size).")
    assert any("at most 0.001 apart" in reason for reason in said["because"])


def test_zero3_is_recommended_where_it_is_faster():
    said = answer(small(zero3_seconds=0.4, mobius_seconds=0.5))
    assert said["headline"] == "zero3 is 1.25 times as fast as mobius here: 0.400 s a step against 0.500 s. " \
                               "Stay with ZeRO-3 here."


def test_times_within_the_spread_of_single_steps_are_no_difference():
    report = small()
    report["arms"]["zero3"]["step_seconds"] = [0.5, 0.6, 0.7, 0.5, 0.6]
    report["arms"]["mobius"]["step_seconds"] = [0.5, 0.55, 0.7, 0.5, 0.55]
    assert "about as fast here" in answer(report)["headline"]


def test_a_machine_without_gpu_answers_in_bytes_and_says_what_its_times_are():
    said = answer(small(device="cpu", zero3_seconds=0.1))
    assert said["headline"] == "mobius moves 8.0 times fewer bytes than zero3; without a GPU here, step times say little."
    assert "faster" not in said["headline"]
    assert "step times (mobius 0.500 s, zero3 0.100 s) are of a CPU" in said["because"][-1]


def test_what_is_emulated_says_so():
    report = {**small(device="cpu"), "emulated": {"topology": "4090-4-2+2", "slowdown": 9.0, "says": "links 9 times slower"}}
    said = answer(report)
    assert said["headline"].startswith("Emulated 4090-4-2+2: mobius is 4.00 times as fast")
    assert said["because"][-1] == "Emulated: links 9 times slower."


def test_losses_that_differ_come_before_any_speed():
    report = small()
    report["comparison"]["max_loss_difference"] = 0.5
    said = answer(report)
    assert said["headline"].startswith("Losses differ by up to 0.5,")
    assert not any("train alike" in reason for reason in said["because"])


def test_losses_that_are_no_numbers_are_said_to_be_none():
    report = small()
    report["comparison"].update(max_loss_difference=None, not_a_number_from={"zero3": 2, "mobius": 3, "ddp": 1})
    assert answer(report)["headline"] == ("The loss is not a number from step 2 on in zero3, from step 3 on in mobius: "
                                          "nothing was trained whose speed could be compared.")


def test_the_first_step_does_not_count_and_one_other_is_no_speed():
    report = small()
    for name, seconds in (("zero3", [1.0, 2.0, 2.0]), ("mobius", [30.0, 0.5, 0.5])):
        report["arms"][name]["step_seconds"] = seconds
    assert answer(report)["headline"].startswith("mobius is 4.00 times as fast")
    report["arms"]["ddp"] = arm(0.1, 2.0, [1.0] * 5)
    for steps in (1, 2):
        for name in ("zero3", "mobius"):
            report["arms"][name]["step_seconds"] = report["arms"][name]["step_seconds"][:steps]
        said = answer(report)
        assert said["headline"] == ("mobius moves 8.0 times fewer bytes than zero3; one step says nothing of speed, so take "
                                    "more with --steps.")
        assert "fast" not in " ".join(said["because"])


def test_time_spent_is_told_where_it_was_recorded_and_tells_observed_arms_apart():
    report = small()
    figures = {"step_seconds": 0.5, "compute_seconds": [0.4, 0.3], "exposed_seconds": [0.05, 0.02], "bubble": 0.3}
    report["figures"] = {"mobius": figures, "zero3": figures}
    waits = "and waits for transfers 50.0 ms at most"
    said = (f"mobius computes 0.400 s on its busiest GPU {waits}; "
            f"zero3 is busy 0.400 s on its busiest GPU (DeepSpeed's host work included) {waits}.")
    assert f"Of a step, {said}" in answer(report)["because"]
    report["emulated"] = {"topology": "4090-2", "slowdown": 9.0, "says": "links 9 times slower"}
    assert f"Of a step (emulated), {said}" in answer(report)["because"]


def test_a_third_arm_that_is_faster_and_arms_that_failed_are_named():
    report = small()
    report["arms"]["ddp"] = arm(0.1, 2.0, report["arms"]["zero3"]["losses"])
    report["failed"] = {"pipeline": {"what": "OOM", "why": "too big"}}
    because = answer(report)["because"]
    assert "The fastest arm is another: ddp, 0.100 s a step." in because
    assert "No numbers of pipeline (OOM)." in because
    report["machine"]["device"] = "cpu"
    assert not any("fastest" in reason for reason in answer(report)["because"])
    report["emulated"] = {"topology": "4090-2", "slowdown": 9.0, "says": "links 9 times slower"}
    assert "The fastest arm is another: ddp, 0.100 s a step (emulated)." in answer(report)["because"]


def test_one_arm_alone_is_not_compared():
    report = small()
    del report["arms"]["mobius"]
    report["comparison"] = {"problems": [], "notes": [], "loss_differences": {}}
    assert "there is no second arm" in answer(report)["headline"]
