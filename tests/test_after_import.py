"""Functions wait for a module to have run, whoever imports it and whenever they are registered."""

import sys

from frankenstein_hf.after_import import after_import


def test_what_is_registered_before_during_or_after_an_import_sees_the_finished_module(tmp_path, monkeypatch):
    seen = []

    def note(when):
        return lambda module: seen.append((when, hasattr(module, "last")))

    source = "import sys\nsys.during()\nlast = True\n"
    (tmp_path / "imported_late.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    # another import that is triggered from within, such as transformers' of `Trainer`, registers once more
    monkeypatch.setattr(sys, "during", lambda: after_import("imported_late", note("during")), raising=False)
    after_import("imported_late", note("before"))
    import imported_late

    after_import("imported_late", note("after"))
    assert seen == [("before", True), ("during", True), ("after", True)]
    assert imported_late.last
