"""Calibration windows: length, no overlap, prefixes, seeds; where the text comes from and what is said when it is missing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from tests.trials import RUN
from tune_prune import embedded
from tune_prune.core.errors import UserError
from tune_prune.core.kinds import texts_of
from tune_prune.data import calibration
from tune_prune.data.calibration import calibration_fingerprint, load_text, resolve, tokenize, windows
from tune_prune.data.sources import hub_datasets

TOKENS = torch.arange(1000)  # every token is its own position


@pytest.mark.parametrize(("seq_len", "count"), [(16, 62), (7, 100), (1000, 1), (2, 500), (33, 5)])
def test_windows_have_the_exact_length_and_do_not_overlap(seq_len, count):
    found = windows(TOKENS, seq_len, count, seed=0)
    assert found.shape == (count, seq_len) and found.dtype == torch.long
    assert torch.equal(found, found[:, :1] + torch.arange(seq_len))  # running text
    assert len(found.unique()) == found.numel()  # no token twice


def test_windows_are_drawn_from_all_over_the_text():
    starts = windows(TOKENS, 10, 50, seed=0)[:, 0]
    assert starts.min() < 200 and starts.max() > 800 and not torch.equal(starts, starts.sort().values)


@pytest.mark.parametrize("count", [1, 13, 62])
def test_fewer_samples_are_the_first_of_more(count):
    assert torch.equal(windows(TOKENS, 16, count, seed=4), windows(TOKENS, 16, 62, seed=4)[:count])


def test_the_seed_decides():
    one = windows(TOKENS, 16, 20, seed=1)
    state = torch.get_rng_state()
    assert torch.equal(one, windows(TOKENS, 16, 20, seed=1))
    assert not torch.equal(one, windows(TOKENS, 16, 20, seed=2))
    assert torch.equal(state, torch.get_rng_state())  # no use of the global generator


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_a_mixture_takes_its_texts_in_turn_each_in_its_own_order(count):
    texts = (TOKENS, TOKENS + 1000, TOKENS[:160] + 2000)
    found = calibration.samples(texts, 16, count, seed=3)
    expected = [windows(texts[i % 3], 16, 10, seed=3)[i // 3] for i in range(count)]
    assert torch.equal(found, torch.stack(expected))
    assert torch.equal(calibration.samples(texts[:1], 16, 30, seed=3), windows(TOKENS, 16, 30, seed=3))


def test_a_mixture_is_known_by_the_content_and_order_of_all(tmp_path):
    one, two = tmp_path / "a.txt", tmp_path / "b.txt"
    one.write_text("one")
    two.write_text("two")
    mixed = calibration_fingerprint(f"{one}+{two}")
    others = [calibration_fingerprint(source) for source in (f"{two}+{one}", f"{one}+embedded", str(one), str(two))]
    assert mixed not in others and len(set(others)) == 4
    two.write_text("three")
    assert calibration_fingerprint(f"{one}+{two}") != mixed
    run = replace(RUN, calibration=f"wikitext2+{one}+c4")
    assert hub_datasets(run) == ["Salesforce/wikitext", "allenai/c4"]


def test_mixtures_are_resolved_text_by_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a+c4.txt"):
        (tmp_path / name).write_text("text")
    assert resolve("a.txt + c4", None, True) == f"{tmp_path}/a.txt+c4"
    assert texts_of(f"{tmp_path}/a.txt+c4") == [f"{tmp_path}/a.txt", "c4"]
    assert resolve("a+c4.txt", None, True) == f"{tmp_path}/a+c4.txt"  # a file, whatever its name
    assert texts_of(f"{tmp_path}/a+c4.txt") == [f"{tmp_path}/a+c4.txt"]
    (tmp_path / "b+").mkdir()
    (tmp_path / "b+" / "c.txt").write_text("text")
    for name, words in {
        "c4+": "'' is neither a file nor",
        "c4+c4": "c4+c4 is no mixture; name each text once",
        "a.txt+./a.txt": "a.txt is no mixture",
        "wikitext+c4": "'wikitext' is neither a file nor",
        "c4+~nobody-here/a.txt": "'~nobody-here/a.txt' is neither a file nor a known source",
        "b+/c.txt": "rename a path that has a plus sign",
    }.items():
        with pytest.raises(UserError, match=re.escape(words)) as error:
            resolve(name, None, True)
        assert "\n" not in str(error.value)


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(UserError) as error:
        windows(TOKENS, 300, 4, seed=0)
    text = str(error.value)
    assert "1,000 tokens, enough for 3 samples of 300; 4 were asked" in text
    assert "\n" not in text and not text.endswith(".")


def test_tokens_are_the_texts_without_special_ones():
    tokenizer = AutoTokenizer.from_pretrained(embedded.model_dir("tiny-llama"))
    text = embedded.calibration_text()[:400]
    ids = tokenize(tokenizer, text)
    assert ids.dtype == torch.long and ids.ndim == 1 and len(ids) > 40
    assert not set(ids.tolist()) & set(tokenizer.all_special_ids)


def test_resolve_without_a_name(tmp_path):
    assert resolve(None, None, model_is_embedded=True) == "embedded"
    assert resolve(None, str(tmp_path), model_is_embedded=True) == "embedded"
    assert resolve(None, None, model_is_embedded=False) == "wikitext2"
    with pytest.raises(UserError, match=r"no calibration text in .*text.*--calibration FILE"):
        resolve(None, str(tmp_path), model_is_embedded=False)
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "wikitext2-raw.test.txt").write_text("never the text that perplexity is reported on")
    with pytest.raises(UserError, match="no calibration text"):
        resolve(None, str(tmp_path), model_is_embedded=False)
    (folder / "wikitext2-raw.valid.txt").write_text("valid")
    assert resolve(None, str(tmp_path), False) == str(folder / "wikitext2-raw.valid.txt")
    (folder / "wikitext2-raw.train.txt").write_text("train")
    assert resolve(None, str(tmp_path), False) == str(folder / "wikitext2-raw.train.txt")


def test_resolve_with_a_name(tmp_path, monkeypatch):
    for name in ("embedded", "wikitext2", "c4"):
        assert resolve(name, None, model_is_embedded=False) == name
    (tmp_path / "my.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert resolve("my.txt", None, True) == str(tmp_path / "my.txt")  # absolute: it travels to workers
    with pytest.raises(UserError, match="'wikitext' is neither a file nor a known source; did you mean 'wikitext2'"):
        resolve("wikitext", None, True)
    for name in (str(tmp_path), "~nobody-here/a.txt"):  # a folder, and that of a user there is not
        with pytest.raises(UserError, match="neither a file"):
            resolve(name, None, True)


def test_texts_are_read_and_known_by_content(tmp_path):
    one, two = tmp_path / "a.txt", tmp_path / "b.txt"
    one.write_text("grüße\n", encoding="utf-8")
    two.write_text("grüße\n", encoding="utf-8")
    assert load_text(str(one)) == "grüße\n"
    assert calibration_fingerprint(str(one)) == calibration_fingerprint(str(two))
    two.write_text("grüße\n", encoding="utf-8-sig")  # a byte order mark is none of the text
    assert calibration_fingerprint(str(one)) == calibration_fingerprint(str(two))
    two.write_text("grüße!\n", encoding="utf-8")
    assert calibration_fingerprint(str(one)) != calibration_fingerprint(str(two))
    assert load_text("embedded") == embedded.calibration_text()
    assert calibration_fingerprint("c4") == "hub:c4"  # of no known commit: the cache has none, and no test asks the hub


@pytest.mark.parametrize(
    ("content", "complaint"), [(None, "cannot be read"), (b"\xff\xfe\x00", "UTF-8"), (b" \n ", "is empty")]
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path, content, complaint):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=complaint) as error:
        load_text(str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)
