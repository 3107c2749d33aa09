"use strict";
(() => {
  const $ = (s, at) => Array.from((at || document).querySelectorAll(s));
  const search = document.getElementById("search"), group = document.getElementById("group"), layer = document.getElementById("layer");
  const count = document.getElementById("count"), rows = $("#sites tbody tr");
  const texts = rows.map(r => r.textContent.toLowerCase());
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((r, n) => {
      const layers = r.dataset.layers ? r.dataset.layers.split(" ") : ["outside"];
      const keep = words.every(w => texts[n].includes(w)) && (!group.value || r.dataset.group === group.value)
        && (!layer.value || layers.includes(layer.value));
      r.hidden = !keep;
      if (keep) shown++;
    });
    count.textContent = `${shown} of ${rows.length} sites`;
  }
  if (search) {
    [search, group, layer].forEach(e => e.addEventListener("input", filter));
    document.getElementById("reset").addEventListener("click", () => { search.value = group.value = layer.value = ""; filter(); search.focus(); });
    document.addEventListener("keydown", e => {
      if (e.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) { e.preventDefault(); search.focus(); }
    });
    filter();
  }
  $("figure").forEach(figure => {
    const svg = figure.querySelector("svg"), info = figure.querySelector(".info");
    if (!svg) return;
    const parts = $("g[data-partners]", svg), stops = $(".vertex,.pill", svg);
    const idle = info.textContent;
    let at = -1, kept = null;
    const cool = () => $(".hot", svg).forEach(g => g.classList.remove("hot"));
    function show(g) {
      cool();
      if (!g) { info.textContent = idle; return; }
      g.classList.add("hot");
      g.dataset.partners.split(" ").filter(Boolean).forEach(p => { const other = document.getElementById(p); if (other) other.classList.add("hot"); });
      (g.getAttribute("class").match(/site-\S+/g) || []).forEach(c => $("." + c, svg).forEach(x => x.classList.add("hot")));
      const title = g.querySelector("title");
      info.textContent = title ? title.textContent : "";
    }
    parts.forEach(g => {
      g.addEventListener("mouseenter", () => show(g));
      g.addEventListener("mouseleave", () => show(kept));
      g.addEventListener("click", e => { e.stopPropagation(); kept = kept === g ? null : g; at = stops.indexOf(g); show(kept); });
    });
    svg.addEventListener("click", () => { kept = null; show(null); });
    svg.addEventListener("keydown", e => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
      if (step) { e.preventDefault(); at = (at + step + stops.length) % stops.length; kept = stops[at]; show(kept); kept.scrollIntoView({ block: "nearest", inline: "nearest" }); }
      if (e.key === "Escape") { kept = null; at = -1; show(null); }
    });
    const size = figure.querySelector("button.size"), canvas = figure.querySelector(".canvas");
    if (size) size.addEventListener("click", () => {
      const full = canvas.classList.toggle("full");
      size.textContent = full ? "Fit to width" : "Full size";
    });
  });
  const open = () => { const e = document.getElementById(decodeURIComponent(location.hash.slice(1))); for (let d = e; d; d = d.parentElement) if (d.tagName === "DETAILS") d.open = true; if (e) e.scrollIntoView(); };
  addEventListener("hashchange", open);
  if (location.hash) open();
})();
