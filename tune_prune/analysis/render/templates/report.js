"use strict";
// Tables that sort by a click on a head, trials that are filtered by words. Without it the page is complete, in its first order.
(() => {
  const text = new Intl.Collator("en", { numeric: true });

  function sort(table, head) {
    const heads = [...head.parentElement.cells];
    const number = head.dataset.type === "number";
    const down = head.getAttribute("aria-sort") === "ascending";
    const key = (row) => row.cells[heads.indexOf(head)].dataset.sort;
    const rows = [...table.tBodies[0].rows].sort((first, second) => {
      const [a, b] = [key(first), key(second)];
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined); // last in both directions
      if (!number) return (down ? -1 : 1) * text.compare(a, b);
      return (down ? -1 : 1) * ((Number(a) > Number(b)) - (Number(a) < Number(b))); // a difference of two infinities is no number
    });
    table.tBodies[0].append(...rows);
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    for (const head of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => sort(table, head));
    }
  }

  for (const section of document.querySelectorAll(".filtered")) {
    const rows = [...section.querySelector("tbody").rows];
    const contents = rows.map((row) => row.textContent.toLowerCase());
    const count = section.querySelector("output");
    section.querySelector(".tools").hidden = false;
    section.querySelector("input[type=search]").addEventListener("input", (event) => {
      const words = event.target.value.toLowerCase().split(/\s+/);
      let shown = 0;
      rows.forEach((row, index) => {
        row.hidden = !words.every((word) => contents[index].includes(word));
        shown += !row.hidden;
      });
      count.value = `${shown} of ${rows.length}`;
    });
    for (const box of section.querySelectorAll("[data-shows]")) {
      box.addEventListener("change", () => {
        section.querySelector("table").classList.toggle(`without-${box.dataset.shows}`, !box.checked);
      });
    }
  }

  // On paper nothing is folded away.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((details) => { details.open = false; }));
})();
