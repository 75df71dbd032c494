import pytest
import torch
from store_cases import structure

from nvalchemi.data.batch import Batch
from nvalchemi.data.datapipes.reader import Reader, ReaderProtocol

STRUCTURES = [structure(n, 2 * n, seed=n) for n in (3, 1, 4)]


class OneByOne(Reader):
    def __len__(self) -> int:
        return len(STRUCTURES)

    def _load_sample(self, index: int) -> dict[str, torch.Tensor]:
        return STRUCTURES[index].to_dict()

    def _get_sample_metadata(self, index: int) -> dict[str, object]:
        return {"name": f"s{index}"}


class ManyAtOnce(Reader):
    def __len__(self) -> int:
        return len(STRUCTURES)

    def _load_many_samples(self, indices):
        return [STRUCTURES[i].to_dict() for i in indices]


@pytest.mark.parametrize("kind", [OneByOne, ManyAtOnce])
def test_either_way_of_loading_gives_the_rest(kind):
    reader = kind()
    assert isinstance(reader, ReaderProtocol)
    assert reader.read_batch([2, 0, -1]) == Batch.from_data_list([STRUCTURES[i] for i in (2, 0, 2)])
    assert reader.read_batch([2, 0, -1]).metadata["index"].tolist() == [2, 0, 2]
    assert reader.read(-1)[0]["energy"] is STRUCTURES[2].energy
    assert [meta["index"] for _, meta in reader] == [0, 1, 2]
    assert reader.get_metadata(0) == (3, 6)
    assert "forces" in reader.field_names and reader.field_levels["forces"] == "atom"
    with reader as same:
        assert same is reader


def test_metadata_of_a_sample():
    assert OneByOne().read(1)[1] == {"index": 1, "name": "s1"}
    assert OneByOne(include_index_in_metadata=False)[1][1] == {"name": "s1"}


def test_mistakes_are_named():
    with pytest.raises(IndexError, match="index -4 is out of range for a reader of 3 samples"):
        OneByOne().read(-4)
    with pytest.raises(ValueError, match="at least one index"):
        OneByOne().read_batch([])

    class Neither(Reader):
        def __len__(self) -> int:
            return 1

    with pytest.raises(NotImplementedError, match="Neither must implement _load_sample"):
        Neither().read(0)

    class TooFew(ManyAtOnce):
        def _load_many_samples(self, indices):
            return super()._load_many_samples(indices)[1:]

    with pytest.raises(RuntimeError, match="one sample per index: got 1 for 2"):
        TooFew().read_many([0, 1])


def test_a_failure_while_iterating_names_the_sample():
    class Broken(OneByOne):
        def _load_sample(self, index: int) -> dict[str, torch.Tensor]:
            if index == 1:
                raise OSError("disk gone")
            return super()._load_sample(index)

    samples = iter(Broken())
    next(samples)
    with pytest.raises(RuntimeError, match="sample 1 of Broken could not be read: disk gone"):
        next(samples)
