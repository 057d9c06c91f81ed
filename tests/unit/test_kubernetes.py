"""The manifests of --backend kubernetes: what they say, and that the API server would take them."""

from __future__ import annotations

import os
import re
import shlex

import kubernetes_validate
import pytest
import yaml
from examples import given
from hypothesis import strategies as st
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

from jaxrun.cli.main import main
from jaxrun.cli.make_job import make_job
from jaxrun.errors import UsageError
from jaxrun.spec.backends.planning import make_plan
from jaxrun.spec.engines.kubernetes import manifest, object_name, to_yaml

SCHEMAS = "1.37"  # of Kubernetes
TOKEN = "0123456789abcdef" * 4


def make(**options):
    given = {"program": ("train.py", "--lr", "0.1", "a b"), "backend": "kubernetes", "image": "ghcr.io/me/train:1"}
    return make_job({**given, **options}, {})


def load(job, name="train-3f9a"):
    return {each["kind"]: each for each in yaml.safe_load_all(manifest(job, TOKEN, name=name, file="train.yaml"))}


def job_spec(parts):
    jobs = parts["JobSet"]["spec"]["replicatedJobs"] if "JobSet" in parts else [{"template": parts["Job"]}]
    return jobs[0]["template"]["spec"]


def container(parts):
    (only,) = job_spec(parts)["template"]["spec"]["containers"]
    return only


def check_rules_of_the_server(spec):
    """Check what the schemas lack (pkg/apis/batch/validation and core/validation of Kubernetes)."""
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] >= 1
    assert pod["restartPolicy"] == "Never", "podFailurePolicy demands it"
    assert spec["podReplacementPolicy"] == "Failed", "podFailurePolicy demands it"
    assert len(spec["podFailurePolicy"]["rules"]) <= 20
    for rule in spec["podFailurePolicy"]["rules"]:
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        codes = rule.get("onExitCodes", {}).get("values", [1])
        assert codes == sorted({*codes}) and 0 not in codes and len(codes) <= 255
        assert rule.get("onExitCodes", {}).get("containerName", "jaxrun") in [
            each["name"] for each in pod["containers"]
        ]
    for rule in spec.get("successPolicy", {"rules": []})["rules"]:
        assert int(rule["succeededIndexes"]) < spec["completions"]
    volumes = [each["name"] for each in pod["volumes"]]
    for each in pod["containers"]:
        assert {mount["name"] for mount in each["volumeMounts"]} <= {*volumes}
        names = [variable["name"] for variable in each["env"]]
        assert len(names) == len({*names})
    assert pod["terminationGracePeriodSeconds"] > 0
    assert "selector" not in spec, "the server makes it"


SHAPES = {
    "one pod": {},
    "many": {"hosts": 512, "gpus_per_host": 8, "processes": 4096},
    "restarts": {"hosts": 4, "max_restarts": 2, "min_hosts": 3, "save_time": 120.0},
    "a jobset": {"hosts": 4, "jobset": True, "max_restarts": 2, "queue": "users", "namespace": "ml"},
    "survivors": {"hosts": 4, "keep_survivors": True},
    "survivors in a jobset": {"hosts": 4, "keep_survivors": True, "jobset": True},
    "a claim": {"run_dir": "claim/runs/first", "queue": "users", "platform": "rocm", "gpus_per_host": 4},
    "variables": {"assignments": ["WANDB_API_KEY=abc", "URL=http://me:pass@h", "A=x $(Y)", "YES=no", "N=1e3", "E="]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_server_would_take_the_manifest(shape):
    job = make(**SHAPES[shape])
    parts = load(job)
    assert [*parts] == (["Secret", "JobSet"] if job.jobset else ["Secret", "Service", "Job"])
    for kind, part in parts.items():
        if kind == "JobSet":
            assert JobsetV1alpha2JobSet.from_dict(part).to_dict() == part
            pod_template = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_spec(parts)}
            kubernetes_validate.validate(pod_template, SCHEMAS, strict=True)
        else:
            kubernetes_validate.validate(part, SCHEMAS, strict=True)
        assert part["metadata"].get("namespace", "") == job.namespace
    check_rules_of_the_server(job_spec(parts))


def test_a_wrong_manifest_would_be_refused_by_this_check():
    part = load(make())["Job"]
    part["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(part, SCHEMAS, strict=True)


def test_every_pod_runs_the_same_command_and_finds_host_0_by_name():
    parts = load(
        make(
            hosts=4,
            processes=8,
            max_restarts=2,
            only_ranks=(range(1), range(4, 7)),
            wrap=("nsys", "profile"),
            bind="cores",
        )
    )
    command = shlex.join(container(parts)["command"])
    assert command == (
        "jaxrun --hosts auto --processes=8 --bind=cores '--wrap=nsys profile' --only-rank=0,4-6 --max-restarts=2 "
        "train.py --lr 0.1 'a b'"
    )
    variables = {each["name"]: each.get("value") for each in container(parts)["env"]}
    assert variables["JAXRUN_HOSTS"] == "4" and variables["JAXRUN_HEAD"] == "train-3f9a-0.train-3f9a:7777"
    assert parts["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": "train-3f9a"}
    assert job_spec(parts)["template"]["spec"]["subdomain"] == parts["Service"]["metadata"]["name"]
    variables = {each["name"]: each.get("value") for each in container(load(make(jobset=True)))["env"]}
    assert variables["JAXRUN_HEAD"] == "train-3f9a-host-0-0.train-3f9a:7777"


def test_secrets_stand_in_the_secret_alone_and_dollars_are_kept():
    job = make(assignments=SHAPES["variables"]["assignments"])
    parts = load(job)
    assert parts["Secret"]["stringData"] == {"JAXRUN_TOKEN": TOKEN, "WANDB_API_KEY": "abc", "URL": "http://me:pass@h"}
    variables = {each["name"]: each.get("value") for each in container(parts)["env"]}
    assert (variables["A"], variables["YES"], variables["N"], variables["E"]) == ("x $$(Y)", "no", "1e3", "")
    reference = {"secretKeyRef": {"name": "train-3f9a", "key": "WANDB_API_KEY"}}
    assert {"name": "WANDB_API_KEY", "valueFrom": reference} in container(parts)["env"]
    shown = manifest(job, None, name="train-3f9a", file="train.yaml")
    assert TOKEN not in shown and "abc" not in shown and "pass" not in shown and 'JAXRUN_TOKEN: "***"' in shown


def test_exit_codes_graces_queues_and_claims_are_said_in_the_words_of_kubernetes():
    parts = load(
        make(hosts=4, max_restarts=2, save_time=120.0, queue="users", run_dir="claim", platform="tpu", gpus_per_host=4)
    )
    spec = job_spec(parts)
    assert [
        (rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in spec["podFailurePolicy"]["rules"]
    ] == [
        ("FailJob", [2, 65]),
        ("Ignore", None),
        ("Ignore", [75]),
    ]
    pod = spec["template"]["spec"]
    assert "successPolicy" not in spec
    assert (spec["backoffLimit"], pod["terminationGracePeriodSeconds"]) == (8, 135)
    assert parts["Job"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "users"
    assert container(parts)["resources"] == {"limits": {"google.com/tpu": "4"}}
    assert "--run-dir=/jaxrun-runs/train" in container(parts)["command"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


@pytest.mark.parametrize("jobset", [False, True])
def test_a_job_that_goes_on_without_lost_pods_is_complete_with_pod_0_and_fails_with_the_last_pod(jobset):
    spec = job_spec(load(make(hosts=4, keep_survivors=True, jobset=jobset)))
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]} and spec["backoffLimit"] == 3
    rules = [(rule["action"], rule["onExitCodes"]["values"]) for rule in spec["podFailurePolicy"]["rules"]]
    assert rules == [("FailJob", [2, 65]), ("Ignore", [73, 75])]
    with_restarts = make(hosts=4, keep_survivors=True, max_restarts=2, jobset=jobset)
    without = job_spec(load(make(hosts=4, max_restarts=2, jobset=jobset)))
    without["podFailurePolicy"]["rules"][-1]["onExitCodes"]["values"] = [73, 75]
    assert job_spec(load(with_restarts)) == {  # the job may be done before another pod is in the place of a lost one
        **without,
        "successPolicy": spec["successPolicy"],
        "template": job_spec(load(with_restarts))["template"],
    }


@pytest.mark.parametrize("wrong", ["../x", "/abs/x", "Claim/x"])
def test_a_run_directory_begins_with_the_name_of_a_claim(wrong):
    with pytest.raises(UsageError, match="begins with the name of a PersistentVolumeClaim"):
        load(make(run_dir=wrong))


@pytest.mark.parametrize(
    ("program", "tag", "expected"),
    [
        ("src/Train_2.py", "", "train-2-ab"),
        ("3d.py", "", "job-3d-ab"),
        ("_.py", "", "job-ab"),
        ("x.py", "Große Läufe, " * 9, "gro-e-l-ufe-gro-e-l-ufe-gro-e-l-ufe-g-ab"),
    ],
)
def test_a_name_is_one_that_kubernetes_takes(program, tag, expected):
    assert object_name(make(program=(program,), tag=tag), "ab") == expected


def as_kubernetes_expands(text, variables):
    """What a container gets: of two dollars one, of "$(NAME)" the variable (third_party/forked/golang/expansion)."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)", lambda found: "$" if found[1] is None else variables.get(found[1], found[0]), text
    )


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize("jobset", [False, True])
@given(text=st.text(st.sampled_from("$()JAXRUN_TOKEN a"), max_size=20) | TEXTS)
def test_a_word_and_a_variable_reach_the_container_as_they_were_given(jobset, text):
    job = make(program=("train.py", text), assignments=[f"A={text}"], jobset=jobset)
    found = container(load(job))
    value = next(each["value"] for each in found["env"] if each["name"] == "A")
    for written in (found["command"][-1], value):
        assert as_kubernetes_expands(written, {"JAXRUN_TOKEN": TOKEN, "A": "a"}) == text
    assert as_kubernetes_expands("$$$(A) $(B) $", {"A": "a"}) == "$a $(B) $"


@pytest.mark.parametrize("name", ["no", "Y", "on", "null", "true", "yes"])
def test_a_secret_whose_name_yaml_reads_as_a_boolean_keeps_its_name(name):
    assert load(make(assignments=[f"{name}=http://me:pass@h"]))["Secret"]["stringData"][name] == "http://me:pass@h"


def test_what_is_not_text_is_refused():
    with pytest.raises(UsageError, match="not valid UTF-8"):
        load(make(program=("train.py", "\udcff")))


@pytest.mark.parametrize(
    "wrong",
    [{"namespace": "A_b"}, {"namespace": "../x"}, {"queue": "a/b"}, {"queue": "a" * 64}, {"image": "UP/Case"},
     {"image": "a:b:c"}, {"image": "-x"}, {"image": "i:1\n"}],
    ids=repr,
)  # fmt: skip
def test_names_that_kubernetes_refuses_are_refused_here(wrong):
    (name,) = wrong
    with pytest.raises(UsageError, match=f"--{name} must be "):
        make(**wrong)


@pytest.mark.parametrize("image", ["i", "localhost:5000/a/b_c:v1", "R.org/a@sha256:" + "0f" * 32, "[::1]:5000/a--b.c"])
def test_images_are_named_as_container_runtimes_read_them(image):
    assert container(load(make(image=image)))["image"] == image


@pytest.mark.parametrize(("option", "backend"), [("--manifest", "kubernetes"), ("--sbatch", "slurm")])
def test_a_fifo_or_a_device_in_the_place_of_the_file_is_refused_at_once(monkeypatch, capsys, tmp_path, option, backend):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    os.mkfifo("fifo")
    image = ["--image", "i"] if backend == "kubernetes" else []
    for name in ("fifo", "/dev/full", "/dev/zero"):
        assert main(["-n", "2", "--backend", backend, *image, option, name, "train.py"]) == 2
        assert f"cannot be written to {name}: it is not a regular file" in capsys.readouterr().err


def test_yaml_reads_back_as_it_was_written():
    value = {
        "on": {"no": 1, "a b": 2, "1": 3},
        "texts": [
            "",
            "yes",
            "~",
            "1.0",
            "0x1f",
            "a: b",
            "# no",
            "- x",
            "é\n\t",
            "null",
            "@",
            "2001-01-01",
            "a.b/c",
            "😀\x7f\x85\u2028\ufeff\\",
        ],
        "others": [1, True, None, {}, [], {"a": [{"b": 1, "c": [2]}]}],
    }
    assert yaml.safe_load(to_yaml(value)) == value


def test_missing_options_are_named(monkeypatch, capsys, tmp_path):
    with pytest.raises(UsageError, match="needs --image"):
        load(make(image=""))
    with pytest.raises(UsageError, match="give --manifest FILE, or --submit"):
        make_plan(make(), {}, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["--backend", "kubernetes", "--image", "i"]
    (tmp_path / "own.yaml").write_text("mine")
    assert main([*words, "--manifest", "own.yaml", "train.py"]) == 2
    assert "own.yaml exists, and is not a manifest of jaxrun" in capsys.readouterr().err
    assert main([*words, "--manifest", "job.yaml", "train.py"]) == 0
    assert "kubectl apply -f job.yaml" in capsys.readouterr().err
    assert (tmp_path / "job.yaml").stat().st_mode & 0o777 == 0o600
