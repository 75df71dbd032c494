"""Files in extended XYZ that are wrong somewhere: the place is told, and nothing is left unread."""

import gzip

import pytest

from nvalchemi.data.convert import audit_labels, import_extxyz, read_extxyz

FRAME = (
    '2\nLattice="3 0 0 0 3 0 0 0 3" Properties=species:S:1:pos:R:3:forces:R:3 energy=-1.5\n'
    "C 0 0 0 0.1 0 0\nC 1 1 1 -0.1 0 0\n"
)


def readers(path, store):
    return (
        lambda: list(read_extxyz(path)),
        lambda: import_extxyz(path, store),
        lambda: import_extxyz(path, store, missing="skip"),
        lambda: audit_labels(path),
    )


@pytest.mark.parametrize("name", ["f.xyz", "f.xyz.gz"])
@pytest.mark.parametrize("blank", ["\n", "  \n\n"])
def test_a_blank_line_never_hides_what_follows(tmp_path, name, blank):
    path = tmp_path / name
    with gzip.open(path, "wt") if name.endswith(".gz") else open(path, "w") as file:
        file.write(FRAME + blank + FRAME)
    after = 5 + blank.count("\n")
    for read in readers(path, tmp_path / "s.zarr"):
        with pytest.raises(ValueError, match=f"line 5 is blank, .* line {after} holds '2'"):
            read()
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("end", ["", "\n", "\n  \n\n"])
def test_blank_lines_at_the_end_are_fine(tmp_path, end):
    (tmp_path / "f.xyz").write_text(FRAME * 3 + end)
    assert len(list(read_extxyz(tmp_path / "f.xyz"))) == 3
    (tmp_path / "f.xyz").write_text((FRAME * 3)[:-1])
    assert len(list(read_extxyz(tmp_path / "f.xyz"))) == 3


def test_cells_written_behind_the_atoms_are_read(tmp_path):
    frame = "1\ncomment\nC 0 0 0\nVEC1 3 0 0\nVEC2 0 4 0\nVEC3 0 0 5\n"
    (tmp_path / "f.xyz").write_text(frame * 2)
    first, second = read_extxyz(tmp_path / "f.xyz", missing="allow")
    assert first.cell[0].diagonal().tolist() == [3, 4, 5]
    assert second == first


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("# of a program\n" + FRAME, "line 1 must hold the number of atoms of structure 0"),
        (FRAME + FRAME.replace("2\n", "1\n", 1), "line 8 must hold .* of structure 2"),
        (FRAME + FRAME.replace("2\n", "-2\n", 1), "line 5 must hold .* of structure 1, got '-2'"),
        (FRAME + FRAME.replace("2\n", "3\n", 1), "structure 1 .* after 3 of the 4 lines"),
        (FRAME + FRAME[:60], "structure 1 .* after 1 of the 3 lines"),
        (FRAME + FRAME.replace("C 0", "Qq 0"), "structure 1 .* 'Qq' is no chemical symbol.*line 5"),
        (FRAME.replace("=species:S:1:pos:R:3:forces:R:3", ""), "structure 0 .* lacks its value"),
        (FRAME.replace("0.1 0 0\n", "**** 0 0\n", 1), r"structure 0 .* '\*\*\*\*'"),
        ("\n\n", "holds no structure"),
    ],
)
def test_mistakes_are_told_with_file_structure_and_line(tmp_path, text, match):
    path = tmp_path / "f.xyz"
    path.write_text(text)
    for read in readers(path, tmp_path / "s.zarr"):
        with pytest.raises(ValueError, match=match) as error:
            read()
        assert "f.xyz" in str(error.value)


def test_a_file_in_another_encoding_says_so(tmp_path):
    path = tmp_path / "f.xyz"
    path.write_bytes(FRAME.replace("energy", 'name="\xfc" energy').encode("latin1"))
    with pytest.raises(ValueError, match="f.xyz, near line .*can't decode"):
        list(read_extxyz(path))


def test_atoms_in_one_place_are_refused_and_reported(tmp_path):
    path = tmp_path / "f.xyz"
    path.write_text(FRAME + FRAME.replace("C 1 1 1", "C 3 0 0"))
    audit = audit_labels(path)
    assert any("1 of 2 structures (1): atoms 0 and 1 lie in one place" in p for p in audit.problems)
    with pytest.raises(ValueError, match="atoms 0 and 1 lie in one place"):
        list(read_extxyz(path, missing="allow"))
    with pytest.warns(UserWarning, match="1 of 2 structures are left out"):
        audit = import_extxyz(path, tmp_path / "s.zarr", missing="skip")
    assert "lie in one place" in audit.refused[1]


def test_exploded_structures_are_refused_and_reported(tmp_path):
    path = tmp_path / "f.xyz"
    path.write_text(FRAME.replace("C 1 1 1", "C 1 1 1e30"))
    with pytest.raises(ValueError, match="more than 2\\^31 cells away"):
        list(read_extxyz(path))
